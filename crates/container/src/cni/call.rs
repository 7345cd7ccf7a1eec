//! The plugin's requests to the daemon, over the daemon's local API.

use std::path::Path;

use serde::{Deserialize, Serialize};
use weft_api::call::{Call, Nothing};
use weft_api::{ApiError, Client, ClientError, ErrorKind};

use super::daemon::{
    Attach, Attached, Checked, Daemon, DaemonError, Detach, Key, Listed, Readiness, Refusal,
};

/// The daemon's answer: done, or refused with a reason that has a code in the specification.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer<T> {
    /// It is done.
    Done(T),
    /// The daemon refuses, and has changed nothing.
    Refused(Refusal, String),
}

/// Names Weft's network whose readiness is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatusRequest {
    /// Weft's network.
    pub network: String,
}

weft_api::calls! {
    /// Attaches a container, wholly or not at all.
    CniAttach = Post "/v1/cni/attach" Attach => Answer<Attached>;
    /// Ends attachments; succeeds for unknown ones.
    CniDetach = Post "/v1/cni/detach" Detach => Answer<Nothing>;
    /// Looks whether an attachment is whole.
    CniCheck = Post "/v1/cni/check" Key => Answer<Checked>;
    /// Attachments made by CNI runtimes.
    CniAttachments = Get "/v1/cni/attachments" Nothing => Vec<Listed>;
    /// Whether attaches to a network succeed now.
    CniStatus = Post "/v1/cni/status" StatusRequest => Readiness;
}

/// The daemon of a runtime directory, behind its local API.
pub struct ApiDaemon(Client);

impl ApiDaemon {
    /// The daemon with this runtime directory.
    #[must_use]
    pub fn of(runtime_dir: &Path) -> Self {
        Self(Client::new(runtime_dir))
    }

    async fn ask<C: Call<Answer = Answer<T>>, T>(
        &self,
        request: &C::Request,
    ) -> Result<T, DaemonError> {
        match self.0.call::<C>(request).await.map_err(unanswered)? {
            Answer::Done(done) => Ok(done),
            Answer::Refused(refusal, why) => Err(DaemonError::Refused(refusal, why)),
        }
    }
}

impl Daemon for ApiDaemon {
    async fn attach(&self, attach: &Attach) -> Result<Attached, DaemonError> {
        self.ask::<CniAttach, _>(attach).await
    }

    async fn detach(&self, detach: &Detach) -> Result<(), DaemonError> {
        self.ask::<CniDetach, _>(detach).await.map(|Nothing {}| ())
    }

    async fn check(&self, key: &Key) -> Result<Checked, DaemonError> {
        self.ask::<CniCheck, _>(key).await
    }

    async fn attachments(&self) -> Result<Vec<Listed>, DaemonError> {
        self.0.ask::<CniAttachments>().await.map_err(unanswered)
    }

    async fn status(&self, network: &str) -> Result<Readiness, DaemonError> {
        let request = StatusRequest { network: network.to_owned() };
        self.0.call::<CniStatus>(&request).await.map_err(unanswered)
    }
}

fn unanswered(error: ClientError) -> DaemonError {
    match error {
        ClientError::NotRunning(socket) => {
            DaemonError::Unreachable(format!("nothing listens on {}", socket.display()))
        }
        ClientError::NotPermitted(socket) => {
            DaemonError::Unreachable(format!("only root may open {}", socket.display()))
        }
        ClientError::Refused(ApiError { kind, error }) => {
            let refusal = match kind {
                ErrorKind::BadRequest => Refusal::Invalid,
                ErrorKind::NotFound => Refusal::Unknown,
                ErrorKind::Conflict | ErrorKind::Unavailable => Refusal::Busy,
                ErrorKind::Internal => Refusal::Internal,
            };
            DaemonError::Refused(refusal, error)
        }
        ClientError::Malformed { .. } | ClientError::Ended(_) | ClientError::TimedOut(_) => {
            DaemonError::Interrupted(error.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test]
    async fn a_daemon_that_is_down_is_unreachable_and_its_refusals_keep_their_codes() {
        let runtime = tempfile::tempdir().unwrap();
        let daemon = ApiDaemon::of(runtime.path());
        let down = daemon.status("weft").await.unwrap_err();
        assert!(matches!(down, DaemonError::Unreachable(_)), "{down}");

        let listener = weft_api::listen(&weft_api::socket_path(runtime.path())).unwrap();
        let field = || ("portMappings".to_owned(), "80".to_owned());
        let routes = weft_api::Routes::new()
            .on(CniDetach, async |_, _| Ok(Answer::Done(Nothing {})))
            .on(CniCheck, move |_, key: Key| async move {
                let (field, value) = field();
                Ok(Answer::Refused(Refusal::Unsupported { field, value }, key.to_string()))
            });
        let serving = tokio::spawn(weft_api::serve(listener, routes.with_state(().into())));
        let name = || "x".to_owned();
        let key = Key { network: name(), container: name(), interface: name() };
        let (field, value) = field();
        let refused = DaemonError::Refused(Refusal::Unsupported { field, value }, key.to_string());
        assert_eq!(daemon.check(&key).await, Err(refused));
        let detach = Detach { target: key.into(), started_ns: u64::MAX };
        assert_eq!(daemon.detach(&detach).await, Ok(()));
        let older = daemon.status("weft").await.unwrap_err();
        assert!(matches!(older, DaemonError::Refused(Refusal::Unknown, _)), "{older}");
        serving.abort();
    }
}

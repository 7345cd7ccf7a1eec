//! Names that a service of this host announces while it has what they lead to. Nothing of them is on disk.

use std::sync::{Arc, PoisonError};

use tokio::sync::{mpsc, oneshot};
use weft_mesh::NameRecord;

use super::Names;
use crate::core::control::Request;

/// By this a service announces names.
#[derive(Clone)]
pub(crate) struct Announcer {
    names: Arc<Names>,
    control: mpsc::Sender<Request>,
}

impl Announcer {
    pub(crate) const fn new(names: Arc<Names>, control: mpsc::Sender<Request>) -> Self {
        Self { names, control }
    }

    /// Announces these names, in place of those before. Returns when the core has told the linked hosts; on failure, in
    /// words, they are announced with the next change.
    pub(crate) async fn set(&self, records: Arc<[NameRecord]>) -> Result<(), String> {
        let Self { names, control } = self.clone();
        let set = tokio::task::spawn_blocking(move || names.announce_now(&control, records)).await;
        set.map_err(|error| error.to_string())?
    }
}

impl Names {
    /// Announces all names of this host once more.
    pub(super) fn announce_again(&self, control: &mpsc::Sender<Request>) {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        let (reply, _) = oneshot::channel();
        let _ = control.blocking_send(Request::SetNames { names: self.own_now(), reply });
    }

    /// Waits for the core, and for a change of the names given by hand: the later one of two has both.
    fn announce_now(
        &self,
        control: &mpsc::Sender<Request>,
        records: Arc<[NameRecord]>,
    ) -> Result<(), String> {
        let _changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        *self.announced.lock().unwrap_or_else(PoisonError::into_inner) = records;
        let (reply, told) = oneshot::channel();
        let _ = control.blocking_send(Request::SetNames { names: self.own_now(), reply });
        let told = told.blocking_recv().map_err(|_| "weft is stopping".to_owned())?;
        told.map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use tokio::sync::watch;
    use weft_api::{DnsAddRequest, DnsRemoveRequest};
    use weft_crypto::PeerId;

    use super::*;
    use crate::config::LaunchOptions;
    use crate::core::control::{NamesSnapshot, NetworkNames};
    use crate::upkeep::store::Store;

    /// A core that has the names that it was told last, and the service's state.
    fn core(dir: &std::path::Path) -> (Announcer, watch::Receiver<Vec<String>>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let settings = LaunchOptions::default()
            .settings(Some(file.path()), std::path::Path::new("/r"))
            .unwrap();
        let local = PeerId::from_bytes([1; 32]);
        let names = Names::new(&settings, local, Store::open(dir).unwrap()).unwrap();
        let (control, mut requests) = mpsc::channel(4);
        let (sender, told) = watch::channel(Vec::new());
        tokio::spawn(async move {
            while let Some(request) = requests.recv().await {
                match request {
                    Request::SetNames { names, reply } => {
                        sender.send_replace(names.into_iter().map(|it| it.name).collect());
                        let _ = reply.send(Ok(()));
                    }
                    Request::Names { reply } => {
                        let networks = Vec::<NetworkNames>::new();
                        _ = reply.send(NamesSnapshot { networks, revision: 1, is_complete: true });
                    }
                    _ => panic!("another request"),
                }
            }
        });
        (Announcer::new(Arc::new(names), control), told)
    }

    fn client(name: &str) -> NameRecord {
        NameRecord {
            name: name.into(),
            network: "weft".into(),
            addresses: vec![[10, 32, 0, 1].into()],
            ports: Vec::new(),
            is_client: true,
        }
    }

    #[tokio::test]
    async fn announced_names_and_those_given_by_hand_leave_each_other_alone() {
        let dir = tempfile::tempdir().unwrap();
        let (announcer, told) = core(dir.path());
        let told = || told.borrow().clone();
        let Announcer { names, control } = announcer.clone();
        announcer.set([client("alice.clients")].into()).await.unwrap();
        assert_eq!(told(), ["alice.clients"]);
        let db = DnsAddRequest {
            name: "db".into(),
            addresses: vec![[10, 32, 0, 2].into()],
            ..DnsAddRequest::default()
        };
        let added = Arc::clone(&names).add(control.clone(), db).await.unwrap();
        assert_eq!(added.len(), 1, "only names by hand are listed as such");
        assert_eq!(told(), ["db", "alice.clients"]);
        announcer.set([client("bob.clients")].into()).await.unwrap();
        assert_eq!(told(), ["db", "bob.clients"]);
        let (again, core) = (Arc::clone(&names), control.clone());
        tokio::task::spawn_blocking(move || again.announce_again(&core)).await.unwrap();
        assert_eq!(told(), ["db", "bob.clients"]);
        let remove = |name: &str| DnsRemoveRequest {
            name: name.into(),
            network: None,
            addresses: Vec::new(),
        };
        let refused = Arc::clone(&names).remove(control.clone(), remove("bob.clients")).await;
        assert!(refused.unwrap_err().error.contains("not given by hand"));
        Arc::clone(&names).remove(control.clone(), remove("db")).await.unwrap();
        assert_eq!(told(), ["bob.clients"]);
        announcer.set(Arc::default()).await.unwrap();
        assert_eq!(told(), Vec::<String>::new());
    }
}

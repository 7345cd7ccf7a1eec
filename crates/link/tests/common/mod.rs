//! Hosts on loopback for the tests of links.
#![allow(clippy::unwrap_used, dead_code, unreachable_pub)]

pub mod raw;

use std::future::Future;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::time::timeout;
use weft_crypto::{PeerId, SessionKey};
use weft_link::{
    Admission, Config, Event, Events, Identity, LinkState, LinkStatus, Links, Secret, Target,
};

/// The longest wait of a test, far longer than any operation takes.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct Host {
    pub links: Links,
    pub events: Events,
    pub addr: SocketAddr,
}

pub struct Up {
    pub peer: PeerId,
    pub session: SessionKey,
    pub session_id: u64,
    pub renewal: bool,
    pub instance: u64,
    pub nickname: String,
    pub hello: serde_json::Value,
}

pub fn password(text: &str) -> Admission {
    Admission::Secret(Secret::new(text.as_bytes().to_vec()).unwrap())
}

pub fn config(admission: Admission) -> Config {
    let mut config = Config::new(Identity::generate().unwrap(), "host", admission);
    config.host = Some(Ipv4Addr::LOCALHOST.into());
    config.port = 0;
    config.timing.backoff_first = Duration::from_millis(50);
    config
}

impl Host {
    pub fn start(config: Config) -> Self {
        let (links, events) = Links::start(config).unwrap();
        let addr = links.local_addr().unwrap();
        Self { links, events, addr }
    }

    pub fn with_password(text: &str) -> Self {
        Self::start(config(password(text)))
    }

    pub fn id(&self) -> PeerId {
        self.links.peer_id()
    }

    pub fn dial(&self, other: &Self) {
        assert!(self.links.connect(Target::from(other.addr)));
    }

    pub async fn event(&mut self) -> Event {
        within(self.events.recv()).await.expect("events have ended")
    }

    /// The next event that is not a notice.
    pub async fn next(&mut self) -> Event {
        loop {
            match self.event().await {
                Event::TargetChanged { .. } | Event::Refused { .. } => {}
                other => return other,
            }
        }
    }

    pub async fn up(&mut self) -> Up {
        match self.next().await {
            Event::Up { peer, session, session_id, renewal, instance, nickname, hello, .. } => {
                Up { peer, session, session_id, renewal, instance, nickname, hello }
            }
            other => panic!("not Up: {other:?}"),
        }
    }

    pub async fn down(&mut self) -> String {
        match self.next().await {
            Event::Down { reason, .. } => reason,
            other => panic!("not Down: {other:?}"),
        }
    }

    pub async fn message(&mut self) -> Vec<u8> {
        match self.next().await {
            Event::Message { bytes, .. } => bytes,
            other => panic!("not Message: {other:?}"),
        }
    }

    /// Waits for a line of status.
    pub async fn until(&self, wanted: impl Fn(&LinkStatus) -> bool) -> LinkStatus {
        within(async {
            loop {
                if let Some(line) = self.links.status().into_iter().find(&wanted) {
                    return line;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
    }

    pub async fn until_failed(&self) -> LinkStatus {
        self.until(|line| line.state == LinkState::Failed).await
    }

    /// Whether no link was up so far, as far as events tell.
    pub fn was_never_up(&mut self) -> bool {
        while let Some(event) = self.events.try_recv() {
            if matches!(event, Event::Up { .. } | Event::Message { .. }) {
                return false;
            }
        }
        true
    }
}

pub async fn within<T>(work: impl Future<Output = T>) -> T {
    timeout(PATIENCE, work).await.expect("nothing happened for too long")
}

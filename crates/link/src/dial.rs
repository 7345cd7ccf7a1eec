//! Keeps dialling one target until it is forgotten.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio::time::sleep;
use weft_crypto::PeerId;

use crate::connect;
use crate::error::Failure;
use crate::limits::{BACKOFF_RESET_S, Timing};
use crate::session::Outcome;
use crate::shared::{Dial, DialKey, Shared, State};
use crate::status::LinkState;
use crate::target::Target;

/// Begins to dial, or dials at once what is dialled already. A reason says that this follows the
/// loss of a link, and then the first attempt waits a little.
pub(crate) fn start(
    shared: &Arc<Shared>,
    state: &mut State,
    key: DialKey,
    target: Target,
    lost: Option<String>,
) {
    if let Some(dial) = state.dials.get_mut(&key) {
        dial.target = target;
        dial.kick.notify_one();
        return;
    }
    let kick = Arc::new(Notify::new());
    let dialler = Dialler {
        shared: shared.clone(),
        key: key.clone(),
        kick: kick.clone(),
        backoff: Backoff::new(&shared.timing),
    };
    let task = tokio::spawn(dialler.run(lost.is_some())).abort_handle();
    let mut dial = Dial::new(target, kick, task);
    if let DialKey::Peer(peer) = key {
        dial.peer = Some(peer);
    }
    if lost.is_some() {
        dial.change(LinkState::Retrying, lost, None, Instant::now(), &shared.events);
    }
    state.dials.insert(key, dial);
}

struct Dialler {
    shared: Arc<Shared>,
    key: DialKey,
    kick: Arc<Notify>,
    backoff: Backoff,
}

impl Dialler {
    async fn run(mut self, mut lost: bool) {
        loop {
            if lost {
                let wait = self.after_loss();
                self.pause(wait).await;
            }
            if let Some((peer, since)) = self.linked() {
                self.while_linked(peer).await;
                if since.elapsed() > Duration::from_secs(BACKOFF_RESET_S) {
                    self.backoff.reset();
                }
                lost = true;
                continue;
            }
            lost = false;
            let Some(target) = self.target() else { return };
            self.set(LinkState::Connecting, None, None);
            let pending = || self.set(LinkState::Pending, None, None);
            match connect::attempt(&self.shared, &target, pending).await {
                Ok(Outcome::Up(peer) | Outcome::Duplicate(peer)) => {
                    self.met(peer);
                    if self.linked().is_none() {
                        lost = true;
                    }
                }
                Err(failure) => {
                    let wait = self.after_failure(&failure);
                    self.pause(wait).await;
                }
            }
        }
    }

    /// Waits, unless it is told to dial at once or the link comes up from the other side.
    async fn pause(&mut self, wait: Duration) {
        let mut changes = self.shared.changed.subscribe();
        let linked = async { while self.linked().is_none() && changes.changed().await.is_ok() {} };
        let kicked = tokio::select! {
            () = sleep(wait) => false,
            () = self.kick.notified() => true,
            () = linked => false,
        };
        if kicked {
            self.backoff.reset();
        }
    }

    async fn while_linked(&self, peer: PeerId) {
        let mut changes = self.shared.changed.subscribe();
        self.met(peer);
        self.set(LinkState::Established, None, None);
        while self.linked().is_some() && changes.changed().await.is_ok() {}
    }

    fn after_failure(&mut self, failure: &Failure) -> Duration {
        let (to, wait) = if failure.is_refusal() {
            (LinkState::Failed, self.backoff.slow())
        } else {
            (LinkState::Retrying, self.backoff.next())
        };
        self.set(to, Some(failure.reason().to_owned()), Some(wait));
        wait
    }

    /// The end of the link has set the state and its reason.
    fn after_loss(&mut self) -> Duration {
        let mut state = self.shared.lock();
        let Some(dial) = state.dials.get_mut(&self.key) else { return Duration::ZERO };
        let wait = match dial.state {
            LinkState::Failed => self.backoff.slow(),
            _ => self.backoff.next(),
        };
        dial.next_try = Some(Instant::now() + wait);
        wait
    }

    fn linked(&self) -> Option<(PeerId, Instant)> {
        let state = self.shared.lock();
        let dial = state.dials.get(&self.key)?;
        if let Some(peer) = dial.peer {
            return state.links.get(&peer).map(|link| (peer, link.since()));
        }
        let (peer, link) = state.links.iter().find(|(peer, _)| dial.is_for(**peer))?;
        Some((*peer, link.since()))
    }

    fn met(&self, peer: PeerId) {
        if let Some(dial) = self.shared.lock().dials.get_mut(&self.key) {
            dial.peer = Some(peer);
        }
    }

    fn target(&self) -> Option<Target> {
        self.shared.lock().dials.get(&self.key).map(|dial| dial.target.clone())
    }

    fn set(&self, to: LinkState, reason: Option<String>, wait: Option<Duration>) {
        self.shared.set_dial(&self.key, to, reason, wait);
    }
}

/// Pauses that grow by half each time, each between half and one and a half of its value.
struct Backoff {
    first: Duration,
    max: Duration,
    present: Duration,
}

impl Backoff {
    fn new(timing: &Timing) -> Self {
        let (first, max) = (timing.backoff_first, timing.backoff_max);
        Self { first, max, present: first }
    }

    fn next(&mut self) -> Duration {
        let wait = jitter(self.present).min(self.max);
        self.present = (self.present * 3 / 2).min(self.max);
        wait
    }

    fn slow(&mut self) -> Duration {
        jitter(self.max).min(self.max)
    }

    fn reset(&mut self) {
        self.present = self.first;
    }
}

fn jitter(wait: Duration) -> Duration {
    wait.mul_f64(rand::random_range(0.5..1.5))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_maximum_and_begin_anew() {
        let timing = Timing::default();
        let mut backoff = Backoff::new(&timing);
        for _ in 0..100 {
            let first = backoff.next();
            assert!(first >= timing.backoff_first / 2 && first <= timing.backoff_first * 3 / 2);
            for _ in 0..30 {
                assert!(backoff.next() <= timing.backoff_max);
            }
            assert!(backoff.next() >= timing.backoff_max / 2);
            assert!(backoff.slow() >= timing.backoff_max / 2);
            backoff.reset();
        }
    }
}

//! Event lines for listeners, one for each event.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Bytes;
use futures_util::Stream;
use serde_json::{Value, json};
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::watch;
use weft_openvpn::device::{Notice, Notification};

use super::json;

/// Lines about peers that may wait for each listener; a slower one misses some and is told so.
const LINES_MAX: usize = 4_096;
/// Packets of the control channel that may wait for each listener: each line has up to 128 KiB.
const PACKETS_MAX: usize = 256;

/// Distributes lines to listeners.
pub(super) struct Lines {
    notices: broadcast::Sender<Arc<str>>,
    /// Separate, so that a flood of packets displaces no notice.
    packets: broadcast::Sender<Arc<str>>,
    /// Peers whose end is not reported yet; negative if an end was reported before its peer was counted.
    untold: watch::Sender<i64>,
    /// No more lines will come.
    over: watch::Sender<bool>,
}

/// An answer on its way: the end waits for it, up to a limit.
#[derive(Clone)]
pub(super) struct OnItsWay {
    _over: watch::Receiver<bool>,
}

/// A listener.
struct Listener {
    notices: broadcast::Receiver<Arc<str>>,
    packets: Option<broadcast::Receiver<Arc<str>>>,
    over: watch::Receiver<bool>,
}

impl Lines {
    pub(super) fn new() -> Self {
        Self {
            notices: broadcast::Sender::new(LINES_MAX),
            packets: broadcast::Sender::new(PACKETS_MAX),
            untold: watch::Sender::new(0),
            over: watch::Sender::new(false),
        }
    }

    /// Reports an event of a peer.
    pub(super) fn tell(&self, notice: &Notice) {
        self.say(&json::notice(notice));
        if matches!(notice.what, Notification::PeerDeleted { .. }) {
            self.untold.send_modify(|peers| *peers -= 1);
        }
    }

    /// Reports that a peer is gone for an unknown reason.
    pub(super) fn tell_gone(&self, device: u32, peer_id: u32) {
        self.say(&json::gone(device, peer_id));
        self.untold.send_modify(|peers| *peers -= 1);
    }

    /// Sends a line about the device as a whole.
    pub(super) fn say(&self, text: &Value) {
        // There may be no listener.
        let _ = self.notices.send(text.to_string().into());
    }

    /// Reports a packet of the control channel. The text is built only if there is a listener.
    pub(super) fn packet(&self, text: impl FnOnce() -> Value) {
        if self.packets.receiver_count() > 0 {
            let _ = self.packets.send(text().to_string().into());
        }
    }

    /// Counts a new peer, whose end will be reported.
    pub(super) fn peer_made(&self) {
        self.untold.send_modify(|peers| *peers += 1);
    }

    /// Waits until the end of every peer is reported.
    pub(super) async fn ends_told(&self) {
        let mut untold = self.untold.subscribe();
        // This fails only without a sender, which `self` holds.
        let _ = untold.wait_for(|peers| *peers <= 0).await;
    }

    /// An answer that [`Self::finish`] waits for, while this value or a clone of it exists.
    pub(super) fn on_its_way(&self) -> OnItsWay {
        OnItsWay { _over: self.over.subscribe() }
    }

    /// Ends all streams: each listener gets its waiting lines, and then the end. Waits until that is
    /// done and no answer is on its way.
    pub(super) async fn finish(&self) {
        self.over.send_replace(true);
        self.over.closed().await;
    }

    /// Streams one line for each event from now on.
    pub(super) fn listen(
        &self,
        with_packets: bool,
    ) -> impl Stream<Item = Result<Bytes, Infallible>> + Send + use<> {
        let listener = Listener {
            notices: self.notices.subscribe(),
            packets: with_packets.then(|| self.packets.subscribe()),
            over: self.over.subscribe(),
        };
        futures_util::stream::unfold(listener, |mut listener| async move {
            let text = listener.next().await?;
            Some((Ok::<_, Infallible>(Bytes::from(text)), listener))
        })
    }
}

impl Listener {
    /// The next line; `None` at the end. Events of peers come before packets.
    async fn next(&mut self) -> Option<String> {
        let line = tokio::select! {
            biased;
            line = self.notices.recv() => line,
            line = next_packet(self.packets.as_mut()) => line,
            () = until_over(&mut self.over) => return None,
        };
        match line {
            Ok(text) => Some(format!("{text}\n")),
            Err(RecvError::Lagged(missed)) => {
                Some(format!("{}\n", json!({"name": "missed", "msg": {"lines": missed}})))
            }
            Err(RecvError::Closed) => None,
        }
    }
}

async fn next_packet(
    packets: Option<&mut broadcast::Receiver<Arc<str>>>,
) -> Result<Arc<str>, RecvError> {
    match packets {
        Some(packets) => packets.recv().await,
        None => std::future::pending().await,
    }
}

async fn until_over(over: &mut watch::Receiver<bool>) {
    // Without a sender it is over, too.
    let _ = over.wait_for(|over| *over).await;
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use futures_util::{FutureExt, StreamExt};
    use weft_openvpn::device::DeletionReason;

    use super::*;

    /// Collects all lines until the end.
    async fn all(
        lines: &Lines,
        told: impl Stream<Item = Result<Bytes, Infallible>>,
    ) -> Vec<String> {
        lines.over.send_replace(true);
        told.map(|line| String::from_utf8(line.unwrap().to_vec()).unwrap()).collect().await
    }

    #[tokio::test]
    async fn a_flood_of_packets_pushes_out_no_notice() {
        let lines = Lines::new();
        let told = lines.listen(true);
        lines.say(&json!("first"));
        for at in 0..4 * PACKETS_MAX {
            lines.packet(|| json!(at));
        }
        lines.say(&json!("second"));
        let told = all(&lines, told).await;
        assert_eq!(told[..2], ["\"first\"\n", "\"second\"\n"]);
        let missed = json!({"name": "missed", "msg": {"lines": 3 * PACKETS_MAX}});
        assert_eq!(told[2], format!("{missed}\n"));
        assert_eq!(told[3], format!("{}\n", 3 * PACKETS_MAX));
        assert_eq!(told.len(), 3 + PACKETS_MAX);
    }

    #[tokio::test]
    async fn packets_are_put_into_words_for_listeners_alone() {
        let lines = Lines::new();
        lines.packet(|| panic!("nobody listens"));
        let told = lines.listen(false);
        lines.packet(|| panic!("nobody listens to packets"));
        lines.say(&json!(1));
        assert_eq!(all(&lines, told).await, ["1\n"]);
    }

    #[tokio::test]
    async fn the_end_waits_for_ends_listeners_and_answers() {
        let lines = Lines::new();
        let told = lines.listen(false);
        lines.peer_made();
        assert_eq!(lines.ends_told().now_or_never(), None);
        let what = Notification::PeerDeleted { peer_id: 5, reason: DeletionReason::Teardown };
        lines.tell(&Notice { device: 7, what });
        assert_eq!(lines.ends_told().now_or_never(), Some(()));
        let answer = lines.on_its_way();
        assert_eq!(lines.finish().now_or_never(), None);
        let told = all(&lines, told).await;
        assert!(told.len() == 1 && told[0].contains("teardown"), "{told:?}");
        assert_eq!(lines.finish().now_or_never(), None);
        drop(answer);
        assert_eq!(lines.finish().now_or_never(), Some(()));
    }
}

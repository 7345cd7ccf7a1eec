//! What is told to who listens, one line for each thing that happens.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Bytes;
use futures_util::Stream;
use serde_json::{Value, json};
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::watch;
use weft_openvpn::device::{Notice, Notification};

use super::json;

/// Lines about peers that wait for each listener at most; a slower one misses some and is told so.
const LINES_MAX: usize = 4_096;
/// Packets of the control channel that wait for each listener at most: as lines they have up to 128 KiB.
const PACKETS_MAX: usize = 256;

/// Where it is said what happens.
pub(super) struct Lines {
    notices: broadcast::Sender<Arc<str>>,
    /// Apart, so that a flood of packets pushes no notice out.
    packets: broadcast::Sender<Arc<str>>,
    /// Peers whose end is not told yet; below zero where an end was told before its peer was counted.
    untold: watch::Sender<i64>,
    /// There is no more to say.
    over: watch::Sender<bool>,
}

/// An answer on its way: the end waits for it, but not for ever.
#[derive(Clone)]
pub(super) struct OnItsWay {
    _over: watch::Receiver<bool>,
}

/// One who listens.
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

    /// Tells what has happened to a peer.
    pub(super) fn tell(&self, notice: &Notice) {
        self.say(&json::notice(notice));
        if matches!(notice.what, Notification::PeerDeleted { .. }) {
            self.untold.send_modify(|peers| *peers -= 1);
        }
    }

    /// Tells that a peer is gone, and that its reason was not heard.
    pub(super) fn tell_gone(&self, device: u32, peer_id: u32) {
        self.say(&json::gone(device, peer_id));
        self.untold.send_modify(|peers| *peers -= 1);
    }

    /// Tells a line that is about the device as a whole.
    pub(super) fn say(&self, text: &Value) {
        // Nobody may be listening.
        let _ = self.notices.send(text.to_string().into());
    }

    /// Tells of a packet of the control channel. It is put into words only if somebody listens.
    pub(super) fn packet(&self, text: impl FnOnce() -> Value) {
        if self.packets.receiver_count() > 0 {
            let _ = self.packets.send(text().to_string().into());
        }
    }

    /// There is one peer more, whose end is to be told.
    pub(super) fn peer_made(&self) {
        self.untold.send_modify(|peers| *peers += 1);
    }

    /// Waits until the end of every peer is told.
    pub(super) async fn ends_told(&self) {
        let mut untold = self.untold.subscribe();
        // It fails only without a sender, which is ours.
        let _ = untold.wait_for(|peers| *peers <= 0).await;
    }

    /// An answer that [`Self::finish`] waits for, as long as this value or a clone of it is there.
    pub(super) fn on_its_way(&self) -> OnItsWay {
        OnItsWay { _over: self.over.subscribe() }
    }

    /// Ends all that is told: who listens gets what waits for him, and then the end. Waits until that is
    /// so, and until no answer is on its way.
    pub(super) async fn finish(&self) {
        self.over.send_replace(true);
        self.over.closed().await;
    }

    /// One line for each thing that happens from now on.
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
    /// The next line; `None` at the end. What happens to peers comes before packets.
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

    /// All that is told until the end.
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

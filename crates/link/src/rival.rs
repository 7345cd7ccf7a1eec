//! Two hosts with one identity: a restarted host replaces its earlier instance, a copy of a running host does
//! not.
//!
//! A copy of a state directory, or of a machine, has the original's key and passes its proof. If the newest
//! connection always won, the two would displace each other forever. So a connection of another instance of a
//! linked peer waits while the existing link is checked for life. If it answers, it stays.

use std::net::IpAddr;
use std::time::Duration;

use quinn::Connection;
use tokio::time::{sleep, timeout};

use crate::error::{CloseCode, Failure};
use crate::limits::{
    OWN_END_TIMEOUT_MS, OWN_ENDS_MAX, RIVAL_LOOK_MS, RIVAL_NAME_MAX_CHARS, RIVAL_TIMEOUT_MS,
};
use crate::link::Admitted;
use crate::shared::Shared;
use crate::socket::canonical;
use crate::status::Direction;
use crate::tls::STREAM_WINDOW_BYTES;

const LABEL_OWN_KEY: &[u8] = b"EXPORTER-weft-own-key-1";

/// How often the present link must answer: a single acknowledgement might already have been on its way.
const ANSWERS: u32 = 2;

/// Whether a connection may become the link with its peer. It is refused if another instance of the peer is
/// linked and alive.
pub(crate) async fn check(shared: &Shared, admitted: &Admitted) -> Result<(), Failure> {
    let present = {
        let state = shared.lock();
        let link = state.links.get(&admitted.peer);
        let rival = link.filter(|link| link.is_rival_of(&admitted.theirs));
        rival.map(|link| (link.conn.clone(), link.nickname.clone()))
    };
    let Some((conn, nickname)) = present else { return Ok(()) };
    if !answers(&conn).await {
        return Ok(());
    }
    let ip = |conn: &Connection| canonical(conn.remote_address()).ip();
    let reason = reason((&admitted.theirs.nickname, ip(&admitted.conn)), (&nickname, ip(&conn)));
    Err(Failure::refused(CloseCode::SameIdentity, reason))
}

/// Classifies a connection whose other end has this host's own key. Either this host dialled itself and holds
/// both ends, or the other end is a copy.
pub(crate) async fn own_key(shared: &Shared, conn: &Connection, direction: Direction) -> Failure {
    let mut end = [0; 16];
    // Without an exported name the other end is not found, and the result is a copy.
    let _ = conn.export_keying_material(&mut end, LABEL_OWN_KEY, &[]);
    let other = |direction| match direction {
        Direction::Inbound => Direction::Outbound,
        Direction::Outbound => Direction::Inbound,
    };
    {
        let mut state = shared.lock();
        if state.own_ends.len() >= OWN_ENDS_MAX {
            state.own_ends.pop_front();
        }
        state.own_ends.push_back((end, direction));
    }
    let is_here = || shared.lock().own_ends.contains(&(end, other(direction)));
    let look = async {
        while !is_here() {
            sleep(Duration::from_millis(RIVAL_LOOK_MS)).await;
        }
    };
    if timeout(Duration::from_millis(OWN_END_TIMEOUT_MS), look).await.is_ok() {
        return Failure::Itself;
    }
    let at = canonical(conn.remote_address()).ip();
    Failure::SameIdentity {
        reason: format!(
            "the host at {at} has the same identity as this one: one is a copy of the other; run `weft reset` on the copy"
        ),
    }
}

/// The text for both ends: advice first, since the text is cut to a length on the wire.
fn reason((copy, at): (&str, IpAddr), (linked, linked_at): (&str, IpAddr)) -> String {
    let short = |name: &str| name.chars().take(RIVAL_NAME_MAX_CHARS).collect::<String>();
    format!(
        "{} at {at} has the same identity as {} at {linked_at}, which is linked and answers: one is a copy of the \
         other; run `weft reset` on the copy",
        short(copy),
        short(linked)
    )
}

/// Whether the other end of a connection still acknowledges packets sent now.
async fn answers(conn: &Connection) -> bool {
    let acks = || conn.stats().frame_rx.acks;
    let ask = async {
        for _ in 0..ANSWERS {
            let before = acks();
            // A wider window is announced, which asks for an acknowledgement; it has no other effect.
            for bytes in [STREAM_WINDOW_BYTES + 1, STREAM_WINDOW_BYTES] {
                conn.set_receive_window(bytes.into());
            }
            while acks() == before {
                sleep(Duration::from_millis(RIVAL_LOOK_MS)).await;
            }
        }
    };
    tokio::select! {
        answered = timeout(Duration::from_millis(RIVAL_TIMEOUT_MS), ask) => answered.is_ok(),
        _ = conn.closed() => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_reason_names_both_and_the_remedy_within_what_crosses_the_wire() {
        let ip = IpAddr::from([0x2001, 0xdb8, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff, 0xffff]);
        let name = "n".repeat(200);
        let reason = reason((&name, ip), (&name, ip));
        assert!(crate::error::clean(&reason).ends_with("run `weft reset` on the copy"), "{reason}");
    }
}

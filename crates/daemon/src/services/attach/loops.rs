//! Detects looping group frames. If two containers also reach each other outside of Weft, each frame returns and
//! is sent again, until an engine or the switch drops it.

use std::sync::Arc;
use std::time::Duration;

use weft_kernel::BROADCASTS_PER_S_MAX;
use weft_kernel::engine::{ANNOUNCEMENTS_OF_SENDER_PER_S_MAX, ANNOUNCEMENTS_PER_S_MAX};
use weft_path::{Mac, Vni};

use super::{Attachments, Saved, mac_of};
use crate::services::supervisor::Pulse;
use crate::upkeep::warnings::Warnings;

/// The interval between checks for looping frames.
const ROUND_LOOK: Duration = Duration::from_secs(5);

/// Checks without such frames until the warning is cleared.
const QUIET_LOOKS: u32 = 12;

/// The mechanism that drops looping frames, by how it detects them.
#[derive(Clone, Copy)]
enum Limit {
    /// The vector engine detects copies of a frame.
    Copies,
    /// The switch counts group frames for peers of the kernel engine, by port.
    Broadcasts,
    /// The switch counts announcements of addresses, by sender.
    Announcements,
}

impl Limit {
    const ALL: [Self; 3] = [Self::Copies, Self::Broadcasts, Self::Announcements];

    /// The key of its warning.
    const fn key(self) -> &'static str {
        match self {
            Self::Copies => "loop",
            Self::Broadcasts => "loop by the kernel",
            Self::Announcements => "loop of announcements",
        }
    }

    /// The looping frames, their rate, and the ones that are dropped, in words.
    fn words(self) -> [String; 3] {
        match self {
            Self::Copies => ["broadcasts", "the same again and again", "copies"].map(str::to_owned),
            Self::Broadcasts => [
                "broadcasts".to_owned(),
                format!("more than {BROADCASTS_PER_S_MAX} a second"),
                "those to other hosts".to_owned(),
            ],
            Self::Announcements => [
                "announcements of addresses".to_owned(),
                format!(
                    "more than {ANNOUNCEMENTS_OF_SENDER_PER_S_MAX} a second of one sender or \
                     {ANNOUNCEMENTS_PER_S_MAX} in all"
                ),
                "those to other hosts".to_owned(),
            ],
        }
    }

    /// The warning's text.
    fn text(self, from: &str) -> String {
        let [what, often, dropped] = self.words();
        // Only copies prove a loop.
        let cause = match self {
            Self::Copies => "they go round where",
            Self::Broadcasts | Self::Announcements => {
                "either the container sends that many, or they go round where"
            }
        };
        format!(
            "loop: {what} from {from}, {often}; {cause} two containers also reach each other outside weft, as by bridges with weft0; {dropped} are dropped"
        )
    }
}

/// Warns while frames loop, for as long as it is polled.
pub(crate) async fn tell_of_rounds(
    attachments: Arc<Attachments>,
    warnings: Warnings,
    pulse: Pulse,
) {
    let mut rounds = Limit::ALL.map(|limit| (limit, Rounds::default()));
    loop {
        pulse.wait(tokio::time::sleep(ROUND_LOOK)).await;
        for (limit, rounds) in &mut rounds {
            match rounds.look(attachments.gone_round(*limit)) {
                Some(true) => {
                    let text = attachments.going_round(*limit).await;
                    warnings.set(limit.key(), text.into_iter().collect());
                }
                Some(false) => warnings.set(limit.key(), Vec::new()),
                None => {}
            }
        }
    }
}

impl Attachments {
    /// How many frames this limit has dropped.
    fn gone_round(&self, limit: Limit) -> u64 {
        match limit {
            Limit::Copies => self.ports.going_round().0,
            Limit::Broadcasts => self.engine.groups().limited,
            Limit::Announcements => self.engine.groups().announcements,
        }
    }

    /// The warning's text, with the frames' origin.
    async fn going_round(&self, limit: Limit) -> Option<String> {
        let from = match limit {
            Limit::Copies => {
                let (vni, mac) = self.ports.going_round().1?;
                self.name_of_sender(Some(vni), mac).await
            }
            Limit::Broadcasts => self.names_of_ports(&self.engine.groups().ports).await?,
            Limit::Announcements => {
                self.name_of_sender(None, Mac(self.engine.groups().announcer?)).await
            }
        };
        Some(limit.text(&from))
    }

    /// An address, with the name of the container here that has it on a network, or on any.
    async fn name_of_sender(&self, vni: Option<Vni>, mac: Mac) -> String {
        let inner = self.lock().await;
        let on = |it: &&Saved| vni.is_none_or(|vni| it.vni() == vni);
        let here = inner.saved.values().filter(on).find(|it| mac_of(&it.attachment) == mac);
        here.map_or_else(
            || mac.to_string(),
            |it| format!("{mac} (container {})", it.attachment.name),
        )
    }

    async fn names_of_ports(&self, ports: &[String]) -> Option<String> {
        if ports.is_empty() {
            return None;
        }
        let inner = self.lock().await;
        let name = |port: &String| {
            let mut saved = inner.saved.values();
            let at = saved.find(|it| it.host_interface == *port);
            at.map_or_else(|| port.clone(), |it| format!("container {}", it.attachment.name))
        };
        Some(ports.iter().map(name).collect::<Vec<_>>().join(", "))
    }
}

/// Looping frames that one limit dropped. Limits count separately: a drop by one says nothing about the
/// others.
#[derive(Default)]
struct Rounds {
    dropped: u64,
    /// Checks since the last drop; `None`: no warning is set.
    quiet: Option<u32>,
}

impl Rounds {
    /// Whether to set the warning now; `Some(false)`: clear it.
    fn look(&mut self, dropped: u64) -> Option<bool> {
        let more = dropped > self.dropped;
        self.dropped = dropped;
        if more {
            self.quiet = Some(0);
            return Some(true);
        }
        let quiet = self.quiet? + 1;
        self.quiet = (quiet < QUIET_LOOKS).then_some(quiet);
        self.quiet.is_none().then_some(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_is_told_of_until_it_has_been_quiet_for_a_while() {
        let mut rounds = Rounds::default();
        assert_eq!(rounds.look(0), None);
        for _ in 0..2 {
            assert_eq!(rounds.look(7), Some(true));
            for _ in 1..QUIET_LOOKS {
                assert_eq!(rounds.look(7), None);
            }
            assert_eq!((rounds.look(7), rounds.look(7)), (Some(false), None));
            // A counter that has restarted.
            assert_eq!(rounds.look(0), None);
        }
    }

    #[test]
    fn each_limit_says_in_the_same_words_what_a_loop_is() {
        for (limit, said) in [
            (Limit::Copies, "broadcasts from here, the same again and again; "),
            (Limit::Broadcasts, "broadcasts from here, more than 200 a second; "),
            (Limit::Announcements, "announcements of addresses from here, more than 256 a second "),
        ] {
            let text = limit.text("here");
            let cause = "they go round where two containers also reach each other outside weft, ";
            assert!(text.starts_with(&format!("loop: {said}")) && text.contains(cause), "{text}");
        }
    }
}

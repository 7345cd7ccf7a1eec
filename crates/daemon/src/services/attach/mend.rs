//! Notices and repairs damage that others do to containers' interfaces.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use weft_kernel::{Kernel, KernelError, PortNotice};

use super::Attachments;
use crate::services::supervisor::Pulse;

/// How long to wait for further damage to a container's interface before it is repaired.
const SETTLE: Duration = Duration::from_millis(300);
/// The longest pause before an interface that is damaged repeatedly is repaired once more.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// After this time without damage the next one is repaired at once.
const QUIET: Duration = Duration::from_secs(120);
/// The pause before a failed repair is retried. Also the interval between checks of all interfaces where
/// the kernel reports no changes.
const RETRY: Duration = Duration::from_secs(30);

/// The fault of one device of an attachment, or that it has none.
pub(crate) struct Judgement {
    /// The attachment.
    pub(crate) id: String,
    /// The device or address.
    pub(crate) of: String,
    pub(crate) damage: Option<String>,
}

/// Interfaces to repair, and those repaired.
#[derive(Default)]
struct Damages {
    pending: BTreeMap<String, Damage>,
    /// When each was last repaired, and how often without a pause of [`QUIET`].
    mended: BTreeMap<String, (Instant, u32)>,
}

struct Damage {
    /// By device.
    of: BTreeMap<String, String>,
    due: Instant,
}

impl Damages {
    /// Returns how long the damage stays, if long enough to report.
    fn note(&mut self, now: Instant, judged: Judgement) -> Option<(String, String, Duration)> {
        let Judgement { id, of, damage } = judged;
        let Some(text) = damage else {
            // The fault was transient.
            if let Some(pending) = self.pending.get_mut(&id) {
                pending.of.remove(&of);
                if pending.of.is_empty() {
                    self.pending.remove(&id);
                }
            }
            return None;
        };
        let earliest = self.mended.get(&id).map_or(now, |(last, times)| *last + pause(*times));
        let due = earliest.max(now + SETTLE);
        let pending = self.pending.entry(id.clone()).or_insert(Damage { of: BTreeMap::new(), due });
        pending.of.insert(of, text.clone());
        let left = pending.due.saturating_duration_since(now);
        (left > SETTLE).then_some((id, text, left))
    }

    fn next(&self) -> Option<Instant> {
        self.pending.values().map(|damage| damage.due).min()
    }

    /// The interfaces due for repair, with their faults.
    fn take(&mut self, now: Instant) -> Vec<(String, String)> {
        let is_due = |damage: &Damage| damage.due <= now;
        let due: Vec<String> =
            self.pending.iter().filter(|(_, it)| is_due(it)).map(|(id, _)| id.clone()).collect();
        self.mended.retain(|_, (last, _)| now < *last + QUIET);
        let mut taken = Vec::with_capacity(due.len());
        for id in due {
            let Some(damage) = self.pending.remove(&id) else { continue };
            let texts: Vec<String> = damage.of.into_values().collect();
            taken.push((id, texts.join(", ")));
        }
        taken
    }

    /// The interface was repaired; the next repair may have to wait.
    fn mended(&mut self, now: Instant, id: String) {
        let times = self.mended.get(&id).map_or(0, |(_, times)| *times);
        self.mended.insert(id, (now, times.saturating_add(1)));
    }

    /// The repair failed; schedules another.
    fn again(&mut self, now: Instant, id: String, text: String) {
        let of = BTreeMap::from([(String::new(), text)]);
        self.pending.entry(id).or_insert(Damage { of, due: now + RETRY });
    }
}

/// Zero before the first three repairs, then ever longer pauses.
fn pause(times: u32) -> Duration {
    match times {
        0..3 => Duration::ZERO,
        more => Duration::from_secs(1 << (more - 3).min(6)).min(PAUSE_MAX),
    }
}

/// Keeps all containers' interfaces in order, for as long as it is polled.
pub(crate) async fn keep_interfaces(kernel: Kernel, attachments: Arc<Attachments>, pulse: Pulse) {
    let mut told = None;
    if pulse.is_again() {
        attachments.plug_in_all().await;
    }
    loop {
        let Err(error) = follow(&kernel, &attachments, &pulse).await;
        let error = error.to_string();
        if told.as_ref() != Some(&error) {
            let every_s = RETRY.as_secs();
            tracing::warn!(
                error,
                every_s,
                "cannot watch containers' interfaces; checking them at intervals"
            );
            told = Some(error);
        }
        pulse.wait(tokio::time::sleep(RETRY)).await;
        attachments.plug_in_all().await;
    }
}

async fn follow(
    kernel: &Kernel,
    attachments: &Attachments,
    pulse: &Pulse,
) -> Result<Infallible, KernelError> {
    let mut watch = kernel.watch_ports()?;
    let mut damages = Damages::default();
    loop {
        let due = damages.next();
        tokio::select! {
            notice = pulse.wait(watch.next()) => match notice? {
                PortNotice::Lost => attachments.plug_in_all().await,
                notice => for judged in attachments.judge(&notice).await {
                    let waits = damages.note(Instant::now(), judged);
                    if let Some((id, text, left)) = waits {
                        let left = left.as_secs().max(1);
                        let text = format!("{text}, again and again; weft repairs it in {left} s");
                        attachments.note_damage(&id, text).await;
                    }
                }
            },
            () = crate::core::control::sleep_until(due) => {
                for (id, text) in damages.take(Instant::now()) {
                    match attachments.mend(&id, &text).await {
                        Ok(true) => damages.mended(Instant::now(), id),
                        Ok(false) => {}
                        Err(_) => damages.again(Instant::now(), id, text),
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn judged(of: &str, damage: Option<&str>) -> Judgement {
        Judgement { id: "netns:a".into(), of: of.into(), damage: damage.map(str::to_owned) }
    }

    #[test]
    fn damage_is_mended_together_and_at_once_but_not_again_and_again() {
        let mut damages = Damages::default();
        let mut now = Instant::now();
        for times in 0..12_u32 {
            let waits = damages.note(now, judged("weft0", Some("weft0 is down")));
            assert!(
                damages.note(now, judged("address", Some("an address is gone"))).is_none()
                    == waits.is_none()
            );
            let due = damages.next().unwrap();
            assert!(damages.take(due - Duration::from_millis(1)).is_empty());
            let wanted = SETTLE.max(pause(times));
            assert_eq!((due - now, waits.is_some()), (wanted, wanted > SETTLE), "{times}");
            let wanted = ("netns:a".to_owned(), "an address is gone, weft0 is down".to_owned());
            assert_eq!(damages.take(due), vec![wanted]);
            now = due;
            damages.mended(now, "netns:a".into());
        }
        assert_eq!(pause(12), PAUSE_MAX);
        now += QUIET;
        damages.take(now);
        assert!(damages.note(now, judged("weft0", Some("weft0 is down"))).is_none());
    }

    #[test]
    fn a_device_that_is_right_again_by_itself_is_left_alone() {
        let mut damages = Damages::default();
        let now = Instant::now();
        damages.note(now, judged("weft0", Some("weft0 is down")));
        damages.note(now, judged("weft0", None));
        assert_eq!(damages.next(), None);
        damages.again(now, "netns:a".into(), "weft0 is gone".into());
        assert_eq!(damages.next(), Some(now + RETRY));
    }
}

//! Finds attachments whose container has ended without DEL: containerd and podman never send GC, and a
//! context that has expired swallows a DEL (containerd #5438).

use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, Read},
    path::Path,
    time::{Duration, Instant},
};

use crate::sandbox::Identify;

/// How long a namespace must be gone before its attachment is dead, in milliseconds. The runtime's own
/// DEL comes before, and tells more.
pub const NAMESPACE_GONE_MS: u64 = 60_000;
/// Length of a boot id, in bytes: a UUID as text.
const BOOT_ID_BYTES: usize = 36;

/// The start of this machine, for [`is_of_earlier_boot`] and tombstones.
///
/// # Errors
/// If `file`, usually [`BOOT_ID_FILE`], cannot be read or holds something else.
pub fn boot_id(file: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(file)?.take(2 * BOOT_ID_BYTES as u64).read_to_string(&mut text)?;
    let id = text.trim();
    let is_uuid = id.len() == BOOT_ID_BYTES
        && id.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    match is_uuid {
        true => Ok(id.to_owned()),
        false => Err(io::Error::other(format!("{} holds no boot id", file.display()))),
    }
}

/// The kernel's file with the boot id.
pub const BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// Whether an attachment that was made under boot id `made` is from before the machine's last start.
/// Then its namespace is gone, and its address can be given to others at once (cri #948, podman #3759).
#[must_use]
pub fn is_of_earlier_boot(made: &str, now: &str) -> bool {
    !made.is_empty() && !now.is_empty() && made != now
}

/// Whether a namespace is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// The path leads to it.
    Present,
    /// The path leads nowhere, or to another one.
    Gone,
    /// It cannot be told now.
    Unknown,
}

/// Looks whether `path` still leads to the namespace with this device and inode.
#[must_use]
pub fn presence(path: &Path, identity: (u64, u64), identify: Identify) -> Presence {
    match identify(path) {
        Ok(found) if found == identity => Presence::Present,
        Ok(_) => Presence::Gone,
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Presence::Gone,
            _ => Presence::Unknown,
        },
    }
}

/// Names attachments whose namespace has been gone for [`NAMESPACE_GONE_MS`].
#[derive(Debug)]
pub struct Reaper<K> {
    gone_since: BTreeMap<K, Instant>,
}

impl<K> Default for Reaper<K> {
    fn default() -> Self {
        Self { gone_since: BTreeMap::new() }
    }
}

impl<K: Ord + Clone> Reaper<K> {
    /// Takes a look at all attachments, and returns those that are dead. They are named again until they
    /// are no longer among `seen`.
    pub fn look(&mut self, now: Instant, seen: impl IntoIterator<Item = (K, Presence)>) -> Vec<K> {
        let mut gone_since = BTreeMap::new();
        for (key, presence) in seen {
            if presence == Presence::Gone {
                let since = self.gone_since.get(&key).copied().unwrap_or(now);
                gone_since.insert(key, since);
            }
        }
        self.gone_since = gone_since;
        let limit = Duration::from_millis(NAMESPACE_GONE_MS);
        let is_dead = |since: Instant| now.saturating_duration_since(since) > limit;
        let dead = self.gone_since.iter().filter(|(_, since)| is_dead(**since));
        dead.map(|(key, _)| key.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::sandbox::identify;

    #[test]
    fn an_attachment_is_dead_once_its_namespace_was_gone_for_a_minute() {
        let (mut reaper, start) = (Reaper::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let gone = || [("web", Presence::Gone), ("db", Presence::Present)];
        assert!(reaper.look(at(0), gone()).is_empty());
        assert!(reaper.look(at(NAMESPACE_GONE_MS), gone()).is_empty());
        assert_eq!(reaper.look(at(NAMESPACE_GONE_MS + 1), gone()), ["web"]);
        assert_eq!(reaper.look(at(NAMESPACE_GONE_MS + 2), gone()), ["web"], "until it is removed");
        assert!(reaper.look(at(NAMESPACE_GONE_MS + 3), [("db", Presence::Present)]).is_empty());
        assert!(reaper.gone_since.is_empty());
    }

    #[test]
    fn a_namespace_that_comes_back_or_cannot_be_seen_starts_the_minute_again() {
        for between in [Presence::Present, Presence::Unknown] {
            let (mut reaper, start) = (Reaper::default(), Instant::now());
            let at = |ms| start + Duration::from_millis(ms);
            assert!(reaper.look(at(0), [("web", Presence::Gone)]).is_empty());
            assert!(reaper.look(at(30_000), [("web", between)]).is_empty());
            assert!(reaper.look(at(NAMESPACE_GONE_MS + 1), [("web", Presence::Gone)]).is_empty());
        }
    }

    #[test]
    fn presence_tells_a_namespace_from_another_at_its_path() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ns");
        std::fs::write(&path, "").unwrap();
        let identity = identify(&path).unwrap();
        assert_eq!(presence(&path, identity, identify), Presence::Present);
        assert_eq!(presence(&path, (identity.0, identity.1 + 1), identify), Presence::Gone);
        assert_eq!(presence(&path.join("below"), identity, identify), Presence::Gone);
        assert_eq!(presence(&directory.path().join("no"), identity, identify), Presence::Gone);
        let denied = |_: &Path| Err(io::Error::from(io::ErrorKind::PermissionDenied));
        assert_eq!(presence(&path, identity, denied), Presence::Unknown);
    }

    #[test]
    fn another_boot_id_forgets_all_and_an_unknown_one_nothing() {
        assert!(is_of_earlier_boot("a", "b"));
        assert!(!is_of_earlier_boot("a", "a"));
        assert!(!is_of_earlier_boot("", "b"));
        assert!(!is_of_earlier_boot("a", ""));
    }

    #[test]
    fn a_boot_id_is_a_uuid() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("boot_id");
        let uuid = "3e1f1d6a-8b5e-4d0c-9f3a-0123456789ab";
        std::fs::write(&file, format!("{uuid}\n")).unwrap();
        assert_eq!(boot_id(&file).unwrap(), uuid);
        for wrong in ["", "nonsense", &uuid.replace('3', "x"), &"a".repeat(10_000)] {
            std::fs::write(&file, wrong).unwrap();
            assert!(boot_id(&file).is_err(), "{wrong}");
        }
        assert!(boot_id(&directory.path().join("none")).is_err());
    }
}

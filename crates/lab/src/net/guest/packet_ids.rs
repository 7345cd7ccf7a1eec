//! The kernel's count of the packet ids of a key of its OpenVPN data channel. The key is gone after four billion
//! packets, which no test can wait for.

use super::KernelMemory;

/// The kernel's fields of a key before its nonce tails: its id and two ciphers.
const CIPHERS: std::ops::Range<usize> = 8..24;
const TAILS_AT: u64 = 24;
/// The count begins a cache line, within this many bytes.
const KEY_BYTES: u64 = 512;
const CACHE_LINE_BYTES: usize = 64;
/// Every kernel address begins with this byte.
const OF_KERNEL: u64 = 0xff;

/// The place where the kernel keeps the next packet id of a key.
#[derive(Debug)]
pub struct PacketIds<'a> {
    memory: &'a KernelMemory,
    at: u64,
}

impl<'a> PacketIds<'a> {
    /// Finds the count of the key that seals with this nonce tail; the key to open with may follow. `send` must
    /// have the key seal at least `least` packets.
    ///
    /// # Errors
    /// There is not one count that has grown so.
    pub fn find(
        memory: &'a KernelMemory,
        nonce_tail: &[u8],
        least: u32,
        send: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Self> {
        let keys: Vec<u64> = memory.find(nonce_tail)?.iter().map(|at| at - TAILS_AT).collect();
        let read = || -> anyhow::Result<Vec<Vec<u8>>> {
            keys.iter().map(|key| memory.read(*key, KEY_BYTES)).collect()
        };
        let before = read()?;
        send()?;
        let mut found = Vec::new();
        for ((key, before), after) in keys.iter().zip(before).zip(read()?) {
            if !has_ciphers(&before) {
                continue;
            }
            let lines = (0..before.len()).step_by(CACHE_LINE_BYTES);
            let grown = lines.filter(|at| {
                let [before, after] = [&before, &after].map(|text| u64::from(count(text, *at)));
                before > 0 && before + u64::from(least) <= after
            });
            found.extend(grown.map(|at| key + at as u64));
        }
        anyhow::ensure!(found.len() == 1, "not one count of packet ids: {found:x?} of {keys:x?}");
        Ok(Self { memory, at: found[0] })
    }

    /// Uses up all but the last `left` packet ids. Packets may be sent meanwhile.
    ///
    /// # Errors
    /// The count there is of more packets, or of none of them; as [`KernelMemory::write`].
    pub fn leave(&self, left: u32) -> anyhow::Result<()> {
        let next = left.wrapping_neg();
        self.memory.write(self.at, &next.to_le_bytes())?;
        let now = count(&self.memory.read(self.at, 4)?, 0);
        anyhow::ensure!(
            is_left(now, left),
            "{left} were left at {:#x}, where {now:#x} is",
            self.at
        );
        Ok(())
    }
}

/// Whether the count has at most `left` packet ids to go; once they are used up, it stays at zero.
const fn is_left(count: u32, left: u32) -> bool {
    count.wrapping_neg() <= left
}

/// Whether the key is in use. Otherwise it is a message that delivered the key, or the rest of one.
fn has_ciphers(key: &[u8]) -> bool {
    let words = key.get(CIPHERS).unwrap_or_default().as_chunks().0;
    !words.is_empty() && words.iter().all(|word| u64::from_le_bytes(*word) >> 56 == OF_KERNEL)
}

fn count(key: &[u8], at: usize) -> u32 {
    let bytes = key.get(at..).and_then(<[u8]>::first_chunk);
    bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_sent_meanwhile_leave_fewer_ids_never_more() {
        let counts = [0xffff_ffeb, 0xffff_ffec, 0xffff_ffed, 0xffff_ffff, 0, 1, 0x4000];
        let left = counts.map(|count| is_left(count, 20));
        assert_eq!(left, [false, true, true, true, true, false, false]);
    }
}

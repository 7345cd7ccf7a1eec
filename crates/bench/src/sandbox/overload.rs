//! Daemons that cannot keep up, and the queues of their sockets.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::Signal;

use super::gate::signal;

/// A process that is held stands still for so long at a time, in milliseconds.
pub const HELD_MS: u64 = 20;
/// Then it goes on for so long, in milliseconds.
pub const FREE_MS: u64 = 5;

/// A process that stands still most of the time, until this is dropped.
#[derive(Debug)]
pub struct Held {
    is_over: Arc<AtomicBool>,
    holder: Option<JoinHandle<()>>,
}

impl Held {
    /// Begins to stop a process at short intervals. A process that has ended is not an error.
    #[must_use]
    pub fn process(pid: u32) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let holder = thread::spawn(move || {
            while !over.load(Ordering::Relaxed) {
                signal(pid, Signal::STOP);
                thread::sleep(Duration::from_millis(HELD_MS));
                signal(pid, Signal::CONT);
                thread::sleep(Duration::from_millis(FREE_MS));
            }
        });
        Self { is_over, holder: Some(holder) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(holder) = self.holder.take() {
            let _ = holder.join();
        }
    }
}

/// The receive queues of the UDP sockets in a process's network namespace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SocketQueues {
    /// Bytes in the fullest queue, by the kernel's count, which includes its overhead for each packet.
    pub fullest_bytes: u64,
    /// Messages dropped so far because a queue was full, over all sockets.
    pub dropped: u64,
}

impl SocketQueues {
    /// Reads the kernel's tables of sockets; nothing where the process is gone.
    #[must_use]
    pub fn of(pid: u32) -> Self {
        let tables = ["udp", "udp6"].map(|table| format!("/proc/{pid}/net/{table}"));
        let texts = tables.iter().filter_map(|table| std::fs::read_to_string(table).ok());
        texts.fold(Self::default(), |queues, text| queues.with(&text))
    }

    /// With the sockets of a table in the form of `/proc/net/udp`.
    fn with(self, table: &str) -> Self {
        let socket = |line: &str| {
            let (_, received) = line.split_whitespace().nth(4)?.split_once(':')?;
            let dropped = line.split_whitespace().last()?.parse::<u64>().ok()?;
            Some((u64::from_str_radix(received, 16).ok()?, dropped))
        };
        let sockets = table.lines().skip(1).filter_map(socket);
        sockets.fold(self, |queues, (bytes, dropped)| Self {
            fullest_bytes: queues.fullest_bytes.max(bytes),
            dropped: queues.dropped + dropped,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fullest_queue_and_all_drops_of_a_table_of_sockets_count() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n\
             1: 00000000:1A80 00000000:0000 07 00000000:00000000 00:00000000 00000000 0 0 1 2 0 5\n\
             2: 00000000:1A81 00000000:0000 07 00000001:0000FF00 00:00000000 00000000 0 0 1 2 0 3\n";
        let queues = SocketQueues::default().with(table);
        assert_eq!(queues, SocketQueues { fullest_bytes: 0xff00, dropped: 8 });
        assert_eq!(SocketQueues::default().with("  sl\n"), SocketQueues::default());
    }
}

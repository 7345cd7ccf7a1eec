//! Memory that a process has freed. Alone in its process, since the allocator's settings are the process's.
#![cfg(target_env = "gnu")]
#![allow(clippy::unwrap_used)]

use std::hint::black_box;
use std::thread;

/// Bytes of a large block, below those that the C library always maps by themselves.
const LARGE_BYTES: usize = 8 << 20;
const THREADS: usize = 12;

/// Memory that the process has in the machine's, in MiB.
fn resident_mib() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() / 1_024
}

#[test]
fn large_blocks_of_many_threads_go_back_to_the_system() {
    weft_io::heap::keep_compact();
    let before = resident_mib();
    // Each makes a large block for a moment, and something behind it that stays.
    let stays = thread::scope(|scope| {
        let one = || {
            drop(black_box(vec![1_u8; LARGE_BYTES]));
            let large = black_box(vec![1_u8; LARGE_BYTES / 2]);
            let stays = vec![1_u8; 64 * 1_024];
            drop(large);
            stays
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(one)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let more = resident_mib().saturating_sub(before);
    assert!(more < 8, "{more} MiB more, with {} small blocks", black_box(&stays).len());
}

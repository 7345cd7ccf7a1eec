//! How the C library's allocator behaves in a process that runs for long.

/// Blocks from this length on are mapped by themselves, in bytes: where the C library begins, too.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES_MIN: libc::c_int = 128 * 1024;
/// Heaps that the threads share.
#[cfg(target_env = "gnu")]
const HEAPS_MAX: libc::c_int = 2;

/// Has freed memory go back to the system, or to the next user, rather than stay where nobody takes it. For a process
/// that keeps many small things and makes large ones for a moment. Called at its start, before there are threads.
///
/// The C library would give each thread a heap of its own, up to eight for each core. Once it has seen a few large
/// blocks go, it would put these there, too. Freed memory serves its heap alone, and small things that stay keep it
/// from being given back. A process of ten thousand sessions held 70 MiB in that way.
///
/// With another C library than glibc nothing is changed.
pub fn keep_compact() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the calls take two numbers each and change settings of the allocator, under its lock.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES_MIN);
        libc::mallopt(libc::M_ARENA_MAX, HEAPS_MAX);
    }
}

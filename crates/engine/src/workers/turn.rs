//! How much a thread takes from one device in one turn.

use std::io;

use crate::ports::errno::nothing_now;

/// Reads from a queue of a TAP device in one turn.
pub const TAP_READS_MAX: usize = 64;
/// Bytes read from a queue of a TAP device in one turn: about eight full super-packets.
pub const TAP_BYTES_MAX: usize = 8 * 65_536;
/// Batches received in one turn.
pub const UDP_BATCHES_MAX: usize = 4;
/// Probes and keepalives sent in one turn.
pub const SENDINGS_MAX: usize = 256;

/// Units that a worker and each of its helpers take in one turn, while there are helpers.
pub const UNITS_MAX: u64 = 8;

/// Reads until nothing is left, or until a turn's share of reads or bytes is taken. `take` reads and handles one
/// frame and returns its length.
///
/// # Errors
/// A read failed, and not for lack of frames.
#[inline]
pub(crate) fn take_turn(mut take: impl FnMut() -> io::Result<usize>) -> io::Result<()> {
    let mut bytes = 0;
    for _ in 0..TAP_READS_MAX {
        match take() {
            Ok(len) => bytes += len,
            Err(error) if nothing_now(&error) => break,
            Err(error) => return Err(error),
        }
        if bytes >= TAP_BYTES_MAX {
            break;
        }
    }
    Ok(())
}

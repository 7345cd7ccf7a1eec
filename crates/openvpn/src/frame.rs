//! Packets over TCP: each has its length before it, two bytes, big-endian, not counting themselves.

use crate::PacketError;

/// Length of the longest packet that a frame can carry, in bytes.
pub const FRAME_BYTES_MAX: usize = u16::MAX as usize;

/// A packet, and the bytes behind its frame.
pub type Split<'a> = (&'a [u8], &'a [u8]);

/// The first packet in the bytes received so far and the bytes behind it; `None`: it is not complete yet.
///
/// # Errors
/// [`PacketError::BadFrame`]: a length of 0 or above `limit`; the stream cannot be read on.
pub fn split(bytes: &[u8], limit: usize) -> Result<Option<Split<'_>>, PacketError> {
    let Some((length, rest)) = bytes.split_first_chunk::<2>() else { return Ok(None) };
    let length = usize::from(u16::from_be_bytes(*length));
    if length == 0 || length > limit {
        return Err(PacketError::BadFrame(length));
    }
    Ok(rest.split_at_checked(length))
}

/// Appends a packet with its length before it.
///
/// # Errors
/// [`PacketError::BadFrame`]: the packet is empty or longer than [`FRAME_BYTES_MAX`].
pub fn write(packet: &[u8], out: &mut Vec<u8>) -> Result<(), PacketError> {
    let bad = PacketError::BadFrame(packet.len());
    let length = u16::try_from(packet.len()).ok().filter(|length| *length > 0).ok_or(bad)?;
    out.extend_from_slice(&length.to_be_bytes());
    out.extend_from_slice(packet);
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn lengths_that_cannot_be_are_refused() {
        assert_eq!(split(&[0, 0, 1], FRAME_BYTES_MAX), Err(PacketError::BadFrame(0)));
        assert_eq!(split(&[8, 0], 2000), Err(PacketError::BadFrame(2048)));
        assert_eq!(split(&[0, 2, 7], FRAME_BYTES_MAX), Ok(None));
        let mut out = Vec::new();
        assert_eq!(write(&[], &mut out), Err(PacketError::BadFrame(0)));
        assert_eq!(write(&vec![0; 65536], &mut out), Err(PacketError::BadFrame(65536)));
        assert_eq!(out, []);
    }

    proptest! {
        #[test]
        fn packets_come_back_however_the_stream_is_cut(
            packets in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..20), 0..6),
            cuts in prop::collection::vec(1_usize..9, 0..60),
        ) {
            let mut stream = Vec::new();
            packets.iter().for_each(|packet| write(packet, &mut stream).unwrap());
            let (mut got, mut held, mut at) = (Vec::new(), Vec::new(), 0);
            for step in cuts.into_iter().chain([stream.len()]) {
                let end = (at + step).min(stream.len());
                held.extend_from_slice(&stream[at..end]);
                at = end;
                while let Some((packet, rest)) = split(&held, FRAME_BYTES_MAX).unwrap() {
                    got.push(packet.to_vec());
                    held = rest.to_vec();
                }
            }
            prop_assert_eq!(got, packets);
            prop_assert_eq!(held, Vec::<u8>::new());
        }
    }
}

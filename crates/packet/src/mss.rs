//! The segment size that the two ends of a TCP connection tell each other (RFC 9293 section 3.7.1). It is
//! lowered to the path's size where an ICMP answer to a longer packet may not get through.

use crate::bytes::{be16, put16};
use crate::checksum;
use crate::layout::{Headers, Layout, Network, Transport};
use crate::split::FrameChecksum;
use crate::{ipv4, ipv6, tcp};

/// Offset of the flags in a TCP header.
const FLAGS_OFFSET: usize = 13;
/// Kind of the option that says the segment size, and its length.
const OPTION: (u8, u8) = (2, 4);
const OPTION_END: u8 = 0;
const OPTION_NOTHING: u8 = 1;

/// Lowers the segment size in a frame that opens a TCP connection so that segments fit an IP packet of `mtu`
/// bytes. True if it was lowered; its checksum is as right as before then. Every other frame stays as it is.
/// `headers` are the frame's, and stay true.
///
/// # Panics
/// If `headers` are not the frame's.
#[inline]
pub fn clamp(frame: &mut [u8], headers: &Headers, mtu: u16, checksum: FrameChecksum) -> bool {
    match headers {
        Ok(layout) => is_opening(frame, layout) && lower(frame, layout, mtu, checksum),
        Err(_) => false,
    }
}

/// Whether a frame with these headers opens a TCP connection, and so may say a segment size.
///
/// # Panics
/// If `headers` are not the frame's.
#[inline]
#[must_use]
pub fn opens(frame: &[u8], headers: &Headers) -> bool {
    headers.as_ref().is_ok_and(|layout| is_opening(frame, layout))
}

#[inline]
fn is_opening(frame: &[u8], layout: &Layout) -> bool {
    layout.transport == Transport::Tcp && frame[layout.l4 + FLAGS_OFFSET] & tcp::SYN != 0
}

#[cold]
fn lower(frame: &mut [u8], layout: &Layout, mtu: u16, checksum: FrameChecksum) -> bool {
    let network = match layout.network {
        Network::V4 => ipv4::LEN,
        Network::V6 => ipv6::LEN,
    };
    let most = usize::from(mtu).saturating_sub(network + tcp::LEN) as u16;
    let Some(at) = option(frame, layout) else { return false };
    let told = be16(frame, at);
    if told <= most {
        return false;
    }
    put16(frame, at, most);
    if checksum == FrameChecksum::Complete {
        let field = layout.l4 + usize::from(tcp::CHECKSUM_OFFSET);
        // Two bytes that are no word of the sum count in it as their halves exchanged.
        let odd = (at - layout.l4) % 2 == 1;
        let word = |value: u16| if odd { value.swap_bytes() } else { value };
        let sum = checksum::update(be16(frame, field), word(told), word(most));
        put16(frame, field, sum);
    }
    true
}

/// The offset of the segment size.
fn option(frame: &[u8], layout: &Layout) -> Option<usize> {
    let mut at = layout.l4 + tcp::LEN;
    while at < layout.payload {
        match *frame.get(at)? {
            OPTION_END => return None,
            OPTION_NOTHING => at += 1,
            kind => {
                let length = *frame.get(at + 1)?;
                let inside = at + usize::from(length) <= layout.payload;
                if (kind, length) == OPTION && inside {
                    return Some(at + 2);
                }
                if length < 2 || !inside {
                    return None;
                }
                at += usize::from(length);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::ethernet;

    fn clamp(frame: &mut [u8], mtu: u16, checksum: FrameChecksum) -> bool {
        let headers = Layout::parse(frame);
        super::clamp(frame, &headers, mtu, checksum)
    }

    fn opens(frame: &[u8]) -> bool {
        super::opens(frame, &Layout::parse(frame))
    }

    /// A segment over IPv4 with these flags and options, its checksum right.
    fn frame(flags: u8, options: &[u8]) -> Vec<u8> {
        let header_len = tcp::LEN + options.len();
        let total = (ipv4::LEN + header_len) as u16;
        let mut frame = vec![0; ethernet::LEN + ipv4::LEN];
        frame[12..14].copy_from_slice(&ethernet::TYPE_IPV4.to_be_bytes());
        frame[14] = 0x45;
        put16(&mut frame, 16, total);
        frame[22] = 64;
        frame[23] = ipv4::PROTOCOL_TCP;
        frame[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([0x13, 0x88, 0x01, 0xbb, 1, 2, 3, 4, 0, 0, 0, 0]);
        frame.extend([(header_len as u8 / 4) << 4, flags, 0xff, 0xff, 0, 0, 0, 0]);
        frame.extend(options);
        let layout = Layout::parse(&frame).unwrap();
        let sum = layout.pseudo(&frame, header_len as u32).bytes(&frame[layout.l4..]).checksum();
        put16(&mut frame, layout.l4 + 16, sum);
        assert!(layout.checksum_ok(&frame));
        frame
    }

    fn told(frame: &[u8]) -> u16 {
        be16(frame, option(frame, &Layout::parse(frame).unwrap()).unwrap())
    }

    #[test]
    fn a_larger_segment_size_is_lowered_wherever_it_stands() {
        // Linux's order; then at an odd offset.
        for options in [&[2, 4, 5, 180, 4, 2, 1, 3][..], &[1, 2, 4, 5, 180, 1, 1, 1]] {
            let mut frame = frame(tcp::SYN | tcp::ACK, options);
            assert_eq!(told(&frame), 1460);
            assert!(opens(&frame) && clamp(&mut frame, 1300, FrameChecksum::Complete));
            assert_eq!(told(&frame), 1260);
            assert!(Layout::parse(&frame).unwrap().checksum_ok(&frame), "{options:?}");
            assert!(!clamp(&mut frame, 1300, FrameChecksum::Complete), "twice");
        }
    }

    #[test]
    fn a_partial_checksum_stays_since_it_does_not_cover_the_option_yet() {
        let mut frame = frame(tcp::SYN, &[2, 4, 5, 180]);
        let before = frame[50..52].to_vec();
        let partial = FrameChecksum::Partial { start: 34, offset: 16 };
        assert!(clamp(&mut frame, 576, partial));
        assert_eq!((told(&frame), &frame[50..52]), (536, &before[..]));
    }

    #[test]
    fn everything_else_stays_as_it_is() {
        let smaller = frame(tcp::SYN, &[2, 4, 2, 24]);
        let no_syn = frame(tcp::ACK, &[2, 4, 5, 180]);
        assert!(!opens(&no_syn) && !opens(&[]) && !opens(&[0; 14]));
        let none = frame(tcp::SYN, &[]);
        let mut udp = frame(tcp::SYN, &[2, 4, 5, 180]);
        udp[23] = ipv4::PROTOCOL_UDP;
        for mut frame in [smaller, no_syn, none, udp, vec![], vec![0; 14]] {
            let before = frame.clone();
            assert!(!clamp(&mut frame, 1300, FrameChecksum::Complete));
            assert_eq!(frame, before);
        }
    }

    #[test]
    fn options_that_contradict_themselves_are_left_alone() {
        for options in [&[2, 5, 5, 180][..], &[3, 0, 2, 4], &[8, 40, 2, 4], &[1, 1, 1, 2]] {
            let mut frame = frame(tcp::SYN, options);
            let before = frame.clone();
            assert!(!clamp(&mut frame, 600, FrameChecksum::Complete), "{options:?}");
            assert_eq!(frame, before);
        }
    }
}

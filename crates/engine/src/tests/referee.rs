//! A naive referee: what a plain network card makes of a frame behind its virtio net header. Written
//! from RFC 791, 768, 1071, 8200, 9293 and virtio 1.2 section 5.1.6, a byte after the other, without
//! a line of what it judges.

/// Bytes of the virtio net header.
pub(crate) const VNET: usize = 10;

/// The frames on the wire: a super-packet cut, a partial checksum finished.
///
/// # Errors
/// Why Linux would not take the frame from a TAP device's owner (`tun_get_user`,
/// `virtio_net_hdr_to_skb`), or that it contradicts itself.
pub(crate) fn frames_of(read: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let (vnet, frame) = read.split_at_checked(VNET).ok_or("no virtio net header")?;
    let field = |at: usize| usize::from(u16::from_le_bytes([vnet[at], vnet[at + 1]]));
    let (partial, kind) = (vnet[0] & 1 != 0, vnet[1] & 0x7f);
    let (hint, size, start, offset) = (field(2), field(4), field(6), field(8));
    if hint > frame.len() {
        return Err(format!("a header of {hint} bytes in a frame of {}", frame.len()));
    }
    if partial && start + offset + 2 > frame.len() {
        return Err(format!("a checksum at {start} + {offset} of {} bytes", frame.len()));
    }
    match kind {
        0 => {
            let mut frame = frame.to_vec();
            if partial {
                let value = finished(sum(&frame[start..]), offset);
                put(&mut frame, start + offset, value);
            }
            Ok(vec![frame])
        }
        1 | 4 | 5 if partial => cut(frame, kind, size, start, offset),
        _ => Err(format!("a super-packet of type {kind}, flags {}", vnet[0])),
    }
}

fn cut(
    frame: &[u8],
    kind: u8,
    size: usize,
    start: usize,
    offset: usize,
) -> Result<Vec<Vec<u8>>, String> {
    let udp = kind == 5;
    let ip = Ip::walk(frame).ok_or("no IP packet")?;
    if (ip.protocol, ip.upper, offset) != if udp { (17, start, 6) } else { (6, start, 16) } {
        return Err(format!("the checksum at {start} + {offset} is not that of {ip:?}"));
    }
    if (kind == 1 && ip.v6) || (kind == 4 && !ip.v6) {
        return Err("the other IP version".to_owned());
    }
    let header = start + if udp { 8 } else { usize::from(frame[start + 12] >> 4) * 4 };
    let payload = frame.get(header..ip.end).ok_or("no payload")?;
    if size == 0 || payload.len().div_ceil(size) > usize::from(u16::MAX) {
        return Err(format!("segments of {size} bytes"));
    }
    // The field holds the sum of the whole pseudo-header; the length must be each segment's.
    let field = start + offset..start + offset + 2;
    let seed = sum(&frame[field]) + u64::from(!((ip.end - start) as u16));
    let count = payload.chunks(size).count();
    let segment = |(index, piece): (usize, &[u8])| {
        let mut out = [&frame[..header], piece].concat();
        let end = out.len();
        if ip.v6 {
            put(&mut out, ip.at + 4, (end - ip.at - 40) as u16);
        } else {
            let id = u16::from_be_bytes([out[ip.at + 4], out[ip.at + 5]]);
            put(&mut out, ip.at + 2, (end - ip.at) as u16);
            put(&mut out, ip.at + 4, id.wrapping_add(index as u16));
            finish_ipv4(&mut out, ip.at);
        }
        if udp {
            put(&mut out, start + 4, (end - start) as u16);
        } else {
            let sequence = u32::from_be_bytes([4, 5, 6, 7].map(|at| frame[start + at]));
            let own = sequence.wrapping_add((index * size) as u32);
            out[start + 4..start + 8].copy_from_slice(&own.to_be_bytes());
            // CWR stands in the first alone, PSH and FIN in the last alone.
            let first = if index == 0 { 0xff } else { 0x7f };
            let last = if index + 1 == count { 0xff } else { 0xf6 };
            out[start + 13] &= first & last;
        }
        put(&mut out, start + offset, 0);
        let value = finished(seed + (end - start) as u64 + sum(&out[start..]), offset);
        put(&mut out, start + offset, value);
        out
    };
    Ok(payload.chunks(size).enumerate().map(segment).collect())
}

/// The offsets of an IP packet's parts in its frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ip {
    pub(crate) v6: bool,
    /// The IP header.
    pub(crate) at: usize,
    /// The protocol behind the IP header, its options and extension headers, and where it begins.
    pub(crate) protocol: u8,
    pub(crate) upper: usize,
    /// Behind the packet; padding may follow.
    pub(crate) end: usize,
}

impl Ip {
    /// Skips VLAN tags, options and extension headers. It skips the header of a fragment only if that is the only
    /// one of its packet (RFC 6946).
    pub(crate) fn walk(frame: &[u8]) -> Option<Self> {
        let mut at = 14;
        while matches!(frame.get(at - 2..at)?, [0x81, 0x00] | [0x88, 0xa8]) {
            at += 4;
        }
        let packet = frame.get(at..)?;
        let word =
            |at: usize| Some(usize::from(u16::from_be_bytes(*packet.get(at..)?.first_chunk()?)));
        let first = *packet.first()?;
        let (v6, protocol, upper, end) = match frame[at - 2..at] {
            [0x08, 0x00] if (0x45..=0x4f).contains(&first) => {
                let upper = at + usize::from(first & 15) * 4;
                (false, *packet.get(9)?, upper, at + word(2)?)
            }
            [0x86, 0xdd] if first >> 4 == 6 => {
                let (mut next, mut upper) = (*packet.get(6)?, at + 40);
                loop {
                    let [after, units, high, low] = *frame.get(upper..)?.first_chunk()?;
                    upper += match next {
                        0 | 43 | 60 => (usize::from(units) + 1) * 8,
                        44 if high == 0 && low & 0xf9 == 0 => 8,
                        _ => break,
                    };
                    next = after;
                }
                (true, next, upper, at + 40 + word(4)?)
            }
            _ => return None,
        };
        (upper <= end && end <= frame.len()).then_some(Self { v6, at, protocol, upper, end })
    }

    /// Whether the packet is a fragment, or may become some, so that its identification counts
    /// (RFC 6864 section 4).
    fn identified(self, frame: &[u8]) -> bool {
        let word = u16::from_be_bytes([frame[self.at + 6], frame[self.at + 7]]);
        word & 0x4000 == 0 || word & 0x3fff != 0
    }
}

/// The bytes that tell flows apart here: all of the Ethernet header, and the IP addresses.
pub(crate) fn flow_of(frame: &[u8]) -> Vec<u8> {
    let Some(ip) = Ip::walk(frame) else { return frame.iter().take(14).copied().collect() };
    let addresses = if ip.v6 { 8..40 } else { 12..20 };
    [&frame[..ip.at], &frame[ip.at + addresses.start..ip.at + addresses.end]].concat()
}

/// The frame without a meaningless identification. Devices must ignore that of a packet that is not a fragment and
/// cannot become one (RFC 6864 section 4.1).
pub(crate) fn without_idle_id(frame: &[u8]) -> Vec<u8> {
    let mut frame = frame.to_vec();
    if let Some(ip) = Ip::walk(&frame)
        && !ip.v6
        && !ip.identified(&frame)
        && sum_ok(&frame[ip.at..ip.at + usize::from(frame[ip.at] & 15) * 4])
    {
        put(&mut frame, ip.at + 4, 0);
        finish_ipv4(&mut frame, ip.at);
    }
    frame
}

/// Joins the IPv4 fragments of each packet, in the order of their last pieces (RFC 791 section 3.2). All pieces
/// must be in order and none missing; other frames pass.
pub(crate) fn reassembled(frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let (mut whole, mut parts) = (Vec::new(), std::collections::BTreeMap::new());
    for frame in frames {
        let word = |ip: Ip| u16::from_be_bytes([frame[ip.at + 6], frame[ip.at + 7]]);
        let Some(ip) = Ip::walk(frame).filter(|ip| !ip.v6 && word(*ip) & 0x3fff != 0) else {
            whole.push(frame.clone());
            continue;
        };
        let key = (flow_of(frame), [frame[ip.at + 4], frame[ip.at + 5], frame[ip.at + 9]]);
        let packet: &mut Vec<u8> = parts.entry(key.clone()).or_default();
        let done = usize::from(word(ip) & 0x1fff) * 8;
        if done == 0 {
            *packet = frame[..ip.end].to_vec();
        } else {
            let upper = ip.at + usize::from(packet[ip.at] & 15) * 4;
            assert_eq!(packet.len() - upper, done, "a gap between fragments");
            packet.extend_from_slice(&frame[ip.upper..ip.end]);
        }
        if word(ip) & 0x2000 == 0 {
            let len = (packet.len() - ip.at) as u16;
            put(packet, ip.at + 2, len);
            put(packet, ip.at + 6, 0);
            finish_ipv4(packet, ip.at);
            whole.extend(parts.remove(&key));
        }
    }
    assert!(parts.is_empty(), "a packet without its last fragment");
    whole
}

/// The Internet checksum (RFC 1071) over a sum.
pub(crate) fn folded(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

/// The plain sum of big-endian words.
pub(crate) fn sum(bytes: &[u8]) -> u64 {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let sum: u64 = pairs.iter().map(|pair| u64::from(u16::from_be_bytes(*pair))).sum();
    sum + rest.first().map_or(0, |last| u64::from(*last) << 8)
}

/// A transport checksum as it is sent: 0 is none in UDP (RFC 768).
pub(crate) fn finished(sum: u64, offset: usize) -> u16 {
    match (!folded(sum), offset) {
        (0, 6) => 0xffff,
        (value, _) => value,
    }
}

pub(crate) fn finish_ipv4(frame: &mut [u8], at: usize) {
    let header = at..at + usize::from(frame[at] & 15) * 4;
    put(frame, at + 10, 0);
    let value = !folded(sum(&frame[header]));
    put(frame, at + 10, value);
}

fn sum_ok(bytes: &[u8]) -> bool {
    folded(sum(bytes)) == 0xffff
}

pub(crate) fn put(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_be_bytes());
}

//! The bytes before the frame in an opened packet. Input: inner UDP header, VXLAN header, frame.

use weft_packet::esp;
use weft_packet::split::FrameChecksum;
use weft_packet::vxlan::{Rco, VxlanHeader};

/// Reading returns the written headers, except the UDP checksum, which is ignored; a mark that is read can be
/// written.
pub fn run(data: &[u8]) {
    if let Ok(header) = VxlanHeader::parse(data) {
        assert_eq!(header.to_bytes()[..], data[..8]);
    }
    let Ok(inner) = esp::parse_inner_headers(data) else { return };
    assert!(inner.frame.end <= data.len());
    let mut written = vec![0; esp::INNER_LEN];
    let (from, to) = (inner.src_port, inner.dst_port);
    esp::write_inner_headers(&mut written, from, to, inner.vxlan, inner.frame.len());
    assert_eq!((&written[..6], &written[8..]), (&data[..6], &data[8..16]));
    if let FrameChecksum::Partial { start, offset } = inner.vxlan.rco.into() {
        assert_eq!(Rco::new(start, offset), inner.vxlan.rco);
    }
}

//! The virtio net header and the partial checksum that it marks. Input: the header, frame.

use weft_packet::split::finish_checksum;
use weft_packet::vnet::VnetHeader;

use super::referee::frames_of;

/// Reading returns the written header. A marked checksum is finished as a naive referee does it, and nothing else
/// changes; a mark outside the frame changes nothing.
pub fn run(data: &[u8]) {
    let Some(vnet) = VnetHeader::parse(data) else {
        assert!(data.len() < 10);
        return;
    };
    assert_eq!(vnet.to_bytes()[..], data[..10]);
    let mut frame = data[10..].to_vec();
    if finish_checksum(&vnet, &mut frame).is_err() {
        assert!(frame == data[10..]);
        return;
    }
    // As a single frame, without the hint.
    let mut plain = data.to_vec();
    plain[1..4].fill(0);
    assert_eq!(frames_of(&plain), Ok(vec![frame]));
}

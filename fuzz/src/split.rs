//! Cutting what a TAP device gives. Input: MTU 2 bytes (little-endian), virtio net header 10, frame.

use weft_packet::coalesce::Coalescer;
use weft_packet::split::{FrameChecksum, Plan, fragment_ipv4};
use weft_packet::vnet::VnetHeader;

use super::coalesce::push;
use super::referee::frames_of;

/// A plan's pieces equal those of a naive referee, each no longer than the path carries. Merged again they are the
/// same, with finished checksums or with a mark.
pub fn run(data: &[u8]) {
    let Some((mtu, read)) = data.split_first_chunk::<2>() else { return };
    let mtu = usize::from(u16::from_le_bytes(*mtu));
    let Some(vnet) = VnetHeader::parse(read) else { return };
    let frame = &read[10..];
    let _ = fragment_ipv4(frame, mtu, |fragment| assert!(fragment.len() <= mtu + 14));
    let Ok(plan) = Plan::new(&vnet, frame, mtu) else { return };
    let finished = segments(&plan, frame, true);
    assert!(finished.iter().all(|segment| segment.len() <= mtu + 14), "longer than the path");

    // The hint counts for nothing, and TCP may be cut smaller than asked.
    let size = if vnet.gso_type == 0 { 0 } else { plan.segment_len as u16 };
    let vnet = VnetHeader { hdr_len: 0, gso_size: size, ..vnet };
    let naive = frames_of(&[&vnet.to_bytes()[..], frame].concat()).expect("the referee refuses it");
    assert!(finished == naive, "not as the referee cuts it");

    assert!(merged(&finished, FrameChecksum::Complete) == naive, "merged, it is another");
    if let Some(rco) = plan.rco() {
        let partial = segments(&plan, frame, false);
        assert!(merged(&partial, Some(rco).into()) == naive, "merged by its marks, it is another");
    }
}

fn segments(plan: &Plan, frame: &[u8], finish: bool) -> Vec<Vec<u8>> {
    let segment = |index| {
        let mut out = vec![0; plan.header_len];
        plan.write_header(frame, index, finish, &mut out);
        out.extend_from_slice(&frame[plan.payload(index)]);
        out
    };
    (0..plan.segments).map(segment).collect()
}

/// The frames after they were merged, as the referee sees them.
fn merged(frames: &[Vec<u8>], checksum: FrameChecksum) -> Vec<Vec<u8>> {
    let arena = frames.concat();
    let (mut coalescer, mut out) = (Coalescer::new(), Vec::new());
    let mut start = 0;
    for frame in frames {
        let range = start..start + frame.len() as u32;
        start = range.end;
        if push(&mut coalescer, &arena, range.clone(), checksum).is_err() {
            super::coalesce::flush(&mut coalescer, &arena, &mut out);
            push(&mut coalescer, &arena, range, checksum).expect("an empty one takes every frame");
        }
    }
    super::coalesce::flush(&mut coalescer, &arena, &mut out);
    out
}

//! Merging received frames. Input, repeated: length 2 bytes (little-endian, modulo 4096), state of its checksums 1
//! byte, frame. State 0: as they stand; bit 0: finished, bit 1: partial, bit 2: but the IPv4 header's as it
//! stands.

use std::collections::BTreeMap;
use std::ops::Range;

use weft_packet::coalesce::{Coalescer, Full};
use weft_packet::layout::Layout;
use weft_packet::split::FrameChecksum;

use super::referee::{
    Ip, finish_ipv4, finished, flow_of, folded, frames_of, put, sum, without_idle_id,
};

/// The output, cut by a naive referee, equals the input, in order within each flow; nothing wrong is made right.
pub fn run(data: &[u8]) {
    let frames = frames(data);
    let arena: Vec<u8> = frames.iter().flat_map(|(frame, _)| frame.iter().copied()).collect();
    let (mut coalescer, mut arrived) = (Coalescer::new(), Vec::new());
    let (mut came, mut start) = (Vec::new(), 0);
    for (frame, checksum) in &frames {
        let range = start..start + frame.len() as u32;
        start = range.end;
        if push(&mut coalescer, &arena, range.clone(), *checksum).is_err() {
            flush(&mut coalescer, &arena, &mut arrived);
            push(&mut coalescer, &arena, range, *checksum).expect("an empty one takes every frame");
        }
        let rejected = coalescer.take_rejected();
        assert_eq!(rejected.bad_range, 0);
        if rejected.bad_mark == 0 {
            came.extend(frames_of(&read_of(frame, *checksum)).expect("a mark within the frame"));
        } else {
            assert_ne!(*checksum, FrameChecksum::Complete, "dropped for a mark that it has not");
        }
    }
    flush(&mut coalescer, &arena, &mut arrived);
    assert!(by_flow(&came) == by_flow(&arrived), "not what came");
}

/// Looks for the frame's headers, and pushes it.
pub(super) fn push(
    coalescer: &mut Coalescer,
    arena: &[u8],
    range: Range<u32>,
    checksum: FrameChecksum,
) -> Result<(), Full> {
    let headers = Layout::parse(&arena[range.start as usize..range.end as usize]);
    coalescer.push(arena, range, &headers, checksum)
}

/// Gives what is written to the referee.
pub(super) fn flush(coalescer: &mut Coalescer, arena: &[u8], out: &mut Vec<Vec<u8>>) {
    coalescer.flush(arena, |merged| {
        let mut read = [&merged.vnet[..], merged.header].concat();
        for slice in merged.slices {
            read.extend_from_slice(&arena[slice.start as usize..slice.end as usize]);
        }
        assert_eq!(read.len(), 10 + merged.frame_len);
        out.extend(frames_of(&read).expect("the kernel would not take it"));
    });
}

fn by_flow(frames: &[Vec<u8>]) -> BTreeMap<Vec<u8>, Vec<Vec<u8>>> {
    let mut flows: BTreeMap<Vec<u8>, Vec<Vec<u8>>> = BTreeMap::new();
    for frame in frames {
        let mut flow = flow_of(frame);
        if let Some(ip) = Ip::walk(frame) {
            flow.push(ip.protocol);
            flow.extend(frame[ip.upper..ip.end].iter().take(4));
        }
        flows.entry(flow).or_default().push(without_idle_id(frame));
    }
    flows
}

fn read_of(frame: &[u8], checksum: FrameChecksum) -> Vec<u8> {
    let mut read = vec![0; 10];
    if let FrameChecksum::Partial { start, offset } = checksum {
        read[0] = 1;
        read[6..8].copy_from_slice(&start.to_le_bytes());
        read[8..10].copy_from_slice(&offset.to_le_bytes());
    }
    read.extend_from_slice(frame);
    read
}

fn frames(mut data: &[u8]) -> Vec<(Vec<u8>, FrameChecksum)> {
    let mut frames = Vec::new();
    while let Some(([low, high, how], rest)) = data.split_first_chunk::<3>() {
        let len = usize::from(u16::from_le_bytes([*low, *high])) % 4096;
        let (frame, rest) = rest.split_at(len.min(rest.len()));
        data = rest;
        frames.push(made(frame.to_vec(), *how));
    }
    frames
}

/// Gives a frame the checksums that it is to have; as they stand if it has no place for them.
fn made(mut frame: Vec<u8>, how: u8) -> (Vec<u8>, FrameChecksum) {
    let Some(ip) = Ip::walk(&frame).filter(|_| how > 0) else {
        return (frame, FrameChecksum::Complete);
    };
    if !ip.v6 && how & 4 == 0 {
        finish_ipv4(&mut frame, ip.at);
    }
    let offset = match ip.protocol {
        6 => 16,
        17 => 6,
        _ => return (frame, FrameChecksum::Complete),
    };
    let field = ip.upper + offset;
    if field + 2 > ip.end || how & 3 == 0 {
        return (frame, FrameChecksum::Complete);
    }
    let addresses = if ip.v6 { ip.at + 8..ip.at + 40 } else { ip.at + 12..ip.at + 20 };
    let length = (ip.end - ip.upper) as u64;
    let pseudo = sum(&frame[addresses]) + u64::from(ip.protocol) + length;
    put(&mut frame, field, folded(pseudo));
    if how & 2 != 0 {
        let (start, offset) = (ip.upper as u16, offset as u16);
        return (frame, FrameChecksum::Partial { start, offset });
    }
    let value = finished(sum(&frame[ip.upper..ip.end]), offset);
    put(&mut frame, field, value);
    (frame, FrameChecksum::Complete)
}

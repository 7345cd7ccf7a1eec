//! Chooses the queue of the switch's TAP device for a frame: one of its flow's worker, by the bucket of its source
//! MAC address.

use std::io;
use std::os::fd::OwnedFd;

use super::load::{self, LOAD_TICK_MAX, TICK_LOAD_BITS, TICK_LOAD_MAX, TICK_NS};
use super::{BUCKET_BITS, SPREAD, TAP_WORKERS_MAX};
use crate::bpf::{
    Array, EXIT, Instruction, KTIME_GET_COARSE_NS, MAP_LOOKUP_ELEM, Mapped, SECOND_HALF, Width,
    add_register, add_value, and_value, call, divide, fetch_long, fetch_word, jump, jump_if,
    jump_if_least, jump_if_least_signed, jump_unless, jump_unless_below, jump_unless_zero,
    load_behind, load_map, load_packet, load_program, move_register, move_value, multiply,
    multiply_32, over, shift_left, shift_right, shift_right_32, store_long, store_word,
    subtract_register,
};
use crate::tap::Tap;

/// The pause in nanoseconds after which a flow may take another way: nothing of it can be under way any more. In
/// the fullest queues a packet has waited for 65 ms (docs/performance.md, "More than the path carries"); the rest
/// is for a peer's thread that got no processor. TCP's first retransmission after such a stall, at 200 ms, must
/// not overtake the original.
pub const FLOW_PAUSE_NS: i32 = 1_000_000_000;

/// Offsets of a frame's source address and EtherType, in bytes.
const SENDER_AT: i32 = 6;
const ETHERTYPE_AT: i32 = 12;
/// Bytes before the IP header.
const ETHERNET_LEN: i32 = 14;
const BPF_PROG_TYPE_SOCKET_FILTER: u32 = 1;

/// Bits of the hash that tells flows apart; flows with the same hash share a worker.
const PLACE_BITS: u32 = 12;
/// The entry of a flow: when its last frame came, in nanoseconds, and its worker, in eight and four bytes.
const PLACE_LEN: usize = 16;
const WORKER_AT: i16 = 8;

/// A worker's load: each has a separate cache line.
const LOAD_LEN: usize = 64;

/// Assigns frames to workers. A hash of the addresses selects a flow's worker. It includes the ports of TCP and UDP,
/// except in fragments, and is the same for both directions. The source address selects the worker of other frames.
/// A new flow goes to another worker if that one has much less load. Flows that begin at once each count as a load.
/// A flow stays with its worker until it has paused for [`FLOW_PAUSE_NS`].
///
/// The kernel keeps its part of this for as long as the device.
#[derive(Debug)]
pub struct FrameSteering {
    /// By the upper bits of a flow's hash.
    places: Array<PLACE_LEN>,
    loads: Mapped<{ LOAD_LEN * TAP_WORKERS_MAX }>,
}

impl FrameSteering {
    /// Finds out whether the kernel takes all that is needed.
    ///
    /// # Errors
    /// A kernel without eBPF, or without the right to use it.
    pub fn new() -> io::Result<Self> {
        let steering = Self { places: Array::new(1 << PLACE_BITS)?, loads: Mapped::new()? };
        steering.to_kernel(2)?;
        Ok(steering)
    }

    /// Has the kernel hand each frame to the queue of its flow and its sender. The queues are those of the
    /// device of `member`, in the order in which they were opened, [`super::BUCKETS`] for each of the
    /// `workers`. [`super::bucket_of_mac`] gives the number of the worker's queue. A frame that ends within
    /// its headers goes to the first queue.
    ///
    /// Called again after a worker's queues were opened, and before the last worker's are closed. Flows stay with
    /// their worker, except those of a worker that goes.
    ///
    /// # Errors
    /// `InvalidInput`: not 1 to [`TAP_WORKERS_MAX`] workers. Else the kernel's error: then it picks as
    /// before. If it was never told, it picks the queue on which the flow's answers were written, or one by
    /// the flow's hash.
    pub fn steer(&self, member: &Tap, workers: usize) -> io::Result<()> {
        if !(1..=TAP_WORKERS_MAX).contains(&workers) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        member.steer(&self.to_kernel(workers as u32)?)
    }

    /// Notes the bytes that a worker has carried, either way, at [`super::tick`].
    #[inline]
    pub fn carried(&self, worker: usize, bytes: u64, tick: u32) {
        if let Some(load) = self.loads.words().get(worker * (LOAD_LEN / 8)) {
            load::add(load, bytes, tick);
        }
    }

    /// The program as the kernel has it.
    fn to_kernel(&self, workers: u32) -> io::Result<OwnedFd> {
        load_program(BPF_PROG_TYPE_SOCKET_FILTER, b"weft_frames", &self.program(workers))
    }

    /// Register 7 gets the number of the bucket, 8 the sum that identifies the flow, 9 its worker.
    fn program(&self, workers: u32) -> Vec<Instruction> {
        let mut program = vec![
            move_register(6, 1),
            load_packet(Width::Word, SENDER_AT + 2),
            move_register(8, 0),
            move_register(7, 0),
            multiply_32(7, SPREAD),
            shift_right_32(7, u32::BITS - BUCKET_BITS),
            move_value(9, 0),
        ];
        let [v6, mut v4] = [sum_ipv6(), sum_ipv4()];
        v4.push(jump(1 + over(&v6)));
        program.push(load_packet(Width::Half, ETHERTYPE_AT));
        program.push(jump_unless(0, libc::ETH_P_IP, over(&v4)));
        program.extend(v4);
        program.push(jump_unless(0, libc::ETH_P_IPV6, over(&v6)));
        program.extend(v6);
        // With a single worker, too: when others come, the flows that go on stay with it.
        program.extend(self.find_worker(workers as i32));
        program.extend([
            shift_left(9, BUCKET_BITS as i32),
            move_register(0, 7),
            add_register(0, 9),
            EXIT,
        ]);
        program
    }

    /// Puts the worker of the flow whose sum is in register 8 into register 9. The packet is not needed any
    /// more: 6 becomes the time, 8 the flow's place.
    fn find_worker(&self, workers: i32) -> Vec<Instruction> {
        let choose = self.choose(workers);
        let keep = [move_register(9, 1), jump(over(&choose))];
        // Two processors may store the time one after the other in the wrong order.
        let look = [
            move_register(8, 0),
            call(KTIME_GET_COARSE_NS),
            move_register(6, 0),
            fetch_long(1, 8, 0),
            store_long(8, 0, 6),
            move_register(2, 6),
            subtract_register(2, 1),
            jump_if_least_signed(2, FLOW_PAUSE_NS, 2 + over(&keep)),
            fetch_word(1, 8, WORKER_AT),
            // One that has gone.
            jump_if_least(1, workers, over(&keep)),
        ];
        let all = [&look[..], &keep, &choose].concat();
        let sum = [
            multiply_32(8, SPREAD),
            move_register(9, 8),
            multiply(9, workers),
            shift_right(9, u32::BITS),
            shift_right_32(8, u32::BITS - PLACE_BITS),
        ];
        [&sum[..], &find(self.places.number(), 8), &[jump_if(0, 0, over(&all))], &all].concat()
    }

    /// Puts the worker of a flow that begins at the place in register 8 and into register 9, which holds the
    /// default worker. Register 0 becomes the address of the loads and 6 the tick. Register 3 becomes the
    /// least load, 4 its worker, and 5 the load of the worker in 9.
    fn choose(&self, workers: i32) -> Vec<Instruction> {
        let begin = [move_value(3, i32::MAX), move_value(4, 0), move_value(5, 0)];
        let compare = (0..workers).flat_map(|worker| {
            [
                &load_of(worker)[..],
                &[
                    jump_unless(9, worker, 1),
                    move_register(5, 1),
                    jump_unless_below(1, 3, 2),
                    move_register(3, 1),
                    move_value(4, worker),
                ],
            ]
            .concat()
        });
        // As `Load::is_spared_for`.
        let end = [
            jump_if_least(5, load::TRIFLE_UNITS, 1),
            jump(8),
            move_register(1, 3),
            multiply(1, load::MUCH_LESS as i32),
            jump_unless_below(1, 5, 1),
            jump(3),
            jump_if_least(5, load::FEW_UNITS, 3),
            add_value(3, load::PRESUMED_UNITS - 1),
            jump_unless_below(3, 5, 1),
            move_register(9, 4),
        ];
        let place = [store_word(8, WORKER_AT, 9)];
        let counted = [&place[..], &begin_flow(workers), &[jump(over(&place))]].concat();
        let all = [&begin[..], &compare.collect::<Vec<_>>(), &end, &counted].concat();
        let time =
            [divide(6, TICK_NS as i32), and_value(6, LOAD_TICK_MAX as i32), move_value(1, 0)];
        let find = find(self.loads.number(), 1);
        [&time[..], &find, &[jump_if(0, 0, over(&all))], &all, &place].concat()
    }
}

/// Puts a worker's load at the tick in register 6 into register 1, as [`super::Load::at`]; 2 is lost. 0 is where
/// the loads are.
fn load_of(worker: i32) -> Vec<Instruction> {
    let max = TICK_LOAD_MAX as i32;
    let both = [
        move_register(2, 1),
        shift_right(2, TICK_LOAD_BITS),
        and_value(2, max),
        and_value(1, max),
        add_register(1, 2),
    ];
    let one = [and_value(1, max)];
    let none = [move_value(1, 0)];
    let [to_none, to_end] = [over(&both) + 1 + over(&one) + 1, over(&one) + 1 + over(&none)];
    [
        &fetch_load(LOAD_LEN as i16 * worker as i16)[..],
        &[jump_if(2, LOAD_TICK_MAX as i32, 1 + over(&both) + 1)],
        &[jump_if_least(2, 2, to_none)],
        &both,
        &[jump(to_end)],
        &one,
        &[jump(over(&none))],
        &none,
    ]
    .concat()
}

/// Puts the load at an offset from register 0 into register 1. Register 2 gets the lead of its tick over that in
/// register 6: -1 ([`LOAD_TICK_MAX`]), 0 or 1, or more.
const fn fetch_load(at: i16) -> [Instruction; 5] {
    [
        fetch_long(1, 0, at),
        move_register(2, 1),
        shift_right(2, 2 * TICK_LOAD_BITS),
        subtract_register(2, 6),
        and_value(2, LOAD_TICK_MAX as i32),
    ]
}

/// Adds the presumed load of a flow that begins at the tick in register 6 to the load of its worker, as
/// [`super::Load::begin`]. The place in register 8 names the worker. Register 0 holds the address of the
/// loads; 0, 1 and 2 are lost.
fn begin_flow(workers: i32) -> Vec<Instruction> {
    let bits = TICK_LOAD_BITS as i32;
    let max = TICK_LOAD_MAX as i32;
    let stamp = [
        move_register(2, 6),
        shift_left(2, 2 * bits),
        add_register(1, 2),
        add_value(1, load::PRESUMED_UNITS),
    ];
    let none = [move_value(1, 0)];
    let one = [and_value(1, max), shift_left(1, bits), jump(over(&none))];
    let both = [
        move_register(2, 1),
        and_value(2, max),
        // No more than a tick's most.
        jump_if_least(2, max - load::PRESUMED_UNITS, 3 + over(&one) + over(&none) + over(&stamp)),
        add_value(1, load::PRESUMED_UNITS),
        jump(over(&one) + over(&none) + over(&stamp)),
    ];
    let add = [
        &fetch_load(0)[..],
        &[jump_if(2, LOAD_TICK_MAX as i32, 1 + over(&both))],
        &[jump_if_least(2, 2, over(&both) + over(&one))],
        &both,
        &one,
        &none,
        &stamp,
        &[store_long(0, 0, 1)],
    ]
    .concat();
    let mut program = vec![
        // Read back: of the register that has it, the verifier of Linux 6.1 follows each way to each value, and
        // gives up. It is always less.
        fetch_word(1, 8, WORKER_AT),
        jump_if_least(1, workers, 2 + over(&add)),
        shift_left(1, LOAD_LEN.ilog2().cast_signed()),
        add_register(0, 1),
    ];
    program.extend(add);
    program
}

/// Puts where an array's element is whose number is in a register into register 0, or zero; 1 to 5 are lost.
fn find(array: libc::c_int, number: u8) -> [Instruction; 6] {
    [
        store_word(10, -4, number),
        load_map(1, array),
        SECOND_HALF,
        move_register(2, 10),
        add_value(2, -4),
        call(MAP_LOOKUP_ELEM),
    ]
}

/// Puts the sum that identifies an IPv4 flow into register 8.
fn sum_ipv4() -> Vec<Instruction> {
    let ports = add_ports();
    let mut program = vec![move_value(8, 0)];
    program.extend([add_word(12), add_word(16)].concat());
    program.extend([
        load_packet(Width::Byte, ETHERNET_LEN),
        and_value(0, 0x0f),
        shift_left(0, 2),
        move_register(9, 0),
        // Of fragments only the first has ports.
        load_packet(Width::Half, ETHERNET_LEN + 6),
        and_value(0, 0x3fff),
        jump_unless_zero(0, 1 + over(&ports)),
        load_packet(Width::Byte, ETHERNET_LEN + 9),
    ]);
    program.extend(ports);
    program
}

/// Puts the sum that identifies an IPv6 flow into register 8.
fn sum_ipv6() -> Vec<Instruction> {
    let mut program = vec![move_value(8, 0)];
    program.extend((8..40).step_by(4).flat_map(add_word));
    program.extend([move_value(9, 40), load_packet(Width::Byte, ETHERNET_LEN + 6)]);
    program.extend(add_ports());
    program
}

/// Adds the ports to register 8, if register 0 is a protocol that has them; 9 is the length of the IP header.
fn add_ports() -> Vec<Instruction> {
    let port = |at| [load_behind(Width::Half, 9, ETHERNET_LEN + at), add_register(8, 0)];
    let ports = [port(0), port(2)].concat();
    let protocols =
        [jump_if(0, libc::IPPROTO_TCP, 1), jump_unless(0, libc::IPPROTO_UDP, over(&ports))];
    [protocols.to_vec(), ports].concat()
}

/// Adds 32 bits of the IP header to register 8.
fn add_word(at: i32) -> [Instruction; 2] {
    [load_packet(Width::Word, ETHERNET_LEN + at), add_register(8, 0)]
}

/// The number of the bucket that frames of a container with this address fall into, below [`super::BUCKETS`]: by
/// its last four bytes.
pub const fn bucket_of_mac([.., c, d, e, f]: [u8; 6]) -> usize {
    (u32::from_be_bytes([c, d, e, f]).wrapping_mul(SPREAD) >> (u32::BITS - BUCKET_BITS)) as usize
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::collections::BTreeSet;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
    use std::time::{Duration, Instant};

    use super::super::{BUCKETS, tick};
    use super::*;
    use crate::namespace::run_in;
    use crate::tap::{FRAME_LEN_MAX, TapOptions, VNET_LEN};
    use crate::testing::{FrameSender, fresh_namespace, ip};

    const ONE: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const TWO: [u8; 6] = [2, 0, 0, 0, 0, 2];
    const UDP: u8 = 17;
    const PAUSE: Duration = Duration::from_nanos(FLOW_PAUSE_NS as u64);

    /// The ends and the protocol of a flow: addresses by their last bytes.
    #[derive(Clone, Copy)]
    struct Flow {
        macs: ([u8; 6], [u8; 6]),
        hosts: (u8, u8),
        ports: (u16, u16),
        protocol: u8,
    }

    impl Flow {
        const fn new(ports: (u16, u16), protocol: u8) -> Self {
            Self { macs: (ONE, TWO), hosts: (1, 2), ports, protocol }
        }

        const fn back(self) -> Self {
            let ((a, b), (c, d), (e, f)) = (self.macs, self.hosts, self.ports);
            Self { macs: (b, a), hosts: (d, c), ports: (f, e), ..self }
        }

        fn frame(self, ethertype: u16, header: &[u8]) -> Vec<u8> {
            let [from, to] = [self.ports.0, self.ports.1].map(u16::to_be_bytes);
            let ends = [&self.macs.1[..], &self.macs.0, &ethertype.to_be_bytes()].concat();
            [&ends, header, &from, &to, &[0; 16]].concat()
        }

        /// A packet with `options` words of options; `fragment` is the field of flags and offset.
        fn ipv4(self, options: u8, fragment: u16) -> Vec<u8> {
            let mut header = vec![0; 20 + 4 * usize::from(options)];
            header[0] = 0x45 + options;
            header[6..8].copy_from_slice(&fragment.to_be_bytes());
            header[9] = self.protocol;
            header[12..16].copy_from_slice(&[10, 32, 0, self.hosts.0]);
            header[16..20].copy_from_slice(&[10, 32, 0, self.hosts.1]);
            self.frame(0x0800, &header)
        }

        fn ipv6(self) -> Vec<u8> {
            let mut header = vec![0; 40];
            (header[0], header[6]) = (0x60, self.protocol);
            (header[8], header[23]) = (0xfd, self.hosts.0);
            (header[24], header[39]) = (0xfd, self.hosts.1);
            self.frame(0x86dd, &header)
        }
    }

    /// A device's queues, and a way to send frames there.
    struct Rig {
        steering: FrameSteering,
        queues: Vec<Tap>,
        sender: FrameSender,
        buffer: Vec<u8>,
    }

    impl Rig {
        fn with_workers(workers: usize) -> Self {
            let options = TapOptions::new("tap0");
            let open = |_| Tap::open(&options).unwrap();
            let queues: Vec<_> = (0..workers * BUCKETS).map(open).collect();
            let steering = FrameSteering::new().unwrap();
            steering.steer(&queues[0], workers).unwrap();
            std::fs::write("/proc/sys/net/ipv6/conf/tap0/disable_ipv6", "1").unwrap();
            ip("link set tap0 arp off up");
            let sender = FrameSender::open("tap0");
            Self { steering, queues, sender, buffer: vec![0; FRAME_LEN_MAX] }
        }

        /// The number of the queue in which a frame comes.
        fn queue_of(&mut self, frame: &[u8]) -> usize {
            self.sender.send(frame).unwrap();
            let Self { queues, buffer, .. } = self;
            let mut got = (0..queues.len()).filter(|number| queues[*number].recv(buffer).is_ok());
            let queue = got.next().unwrap();
            assert_eq!(got.next(), None);
            assert_eq!(buffer[VNET_LEN..VNET_LEN + frame.len()], *frame);
            queue
        }

        /// The number of the worker that gets a frame, in the queue that is its sender's.
        fn worker_of(&mut self, frame: &[u8]) -> usize {
            let queue = self.queue_of(frame);
            let sender = frame[6..12].try_into().unwrap();
            assert_eq!(queue % BUCKETS, bucket_of_mac(sender), "{frame:x?}");
            queue / BUCKETS
        }
    }

    fn in_a_namespace(test: impl FnOnce() + Send) {
        run_in(fresh_namespace(), test).unwrap();
    }

    #[test]
    fn both_directions_of_a_flow_are_one_workers_and_flows_are_shared_out() {
        in_a_namespace(|| {
            let mut rig = Rig::with_workers(3);
            let kinds: [fn(Flow) -> Vec<u8>; 3] =
                [|flow| flow.ipv4(0, 0x4000), |flow| flow.ipv4(2, 0), Flow::ipv6];
            for (kind, protocol) in kinds.into_iter().flat_map(|kind| [(kind, 6), (kind, UDP)]) {
                let mut workers = BTreeSet::new();
                for port in 0..30 {
                    let flow = Flow::new((40_000 + port, 443), protocol);
                    let worker = rig.worker_of(&kind(flow));
                    assert_eq!(worker, rig.worker_of(&kind(flow.back())), "port {port}");
                    workers.insert(worker);
                }
                assert_eq!(workers.len(), 3, "protocol {protocol}");
            }
            // Options move the ports and change nothing.
            let flow = Flow::new((40_001, 443), UDP);
            assert_eq!(rig.worker_of(&flow.ipv4(0, 0)), rig.worker_of(&flow.ipv4(10, 0)));
        });
    }

    #[test]
    fn frames_without_ports_go_by_addresses_and_others_by_their_sender() {
        in_a_namespace(|| {
            let mut rig = Rig::with_workers(5);
            let flow = |port, protocol| Flow::new((port, port), protocol);
            let datagram = |fragment| flow(fragment, UDP).ipv4(0, fragment);
            let alike: [(&str, [Vec<u8>; 4]); 3] = [
                ("fragments", [0x2000, 0x2001, 0x00b9, 0x01ff].map(datagram)),
                ("ICMP", [1, 2, 3, 4].map(|port| flow(port, 1).ipv4(0, 0))),
                ("ARP", [1, 2, 3, 4].map(|port| flow(port, 0).frame(0x0806, &[port as u8; 8]))),
            ];
            for (what, frames) in alike {
                let workers: BTreeSet<_> = frames.iter().map(|it| rig.worker_of(it)).collect();
                assert_eq!(workers.len(), 1, "{what}");
            }
            let of_host = |host| Flow { hosts: (host, 200), ..flow(7, 1) };
            let workers: BTreeSet<_> =
                (0..40).map(|host| rig.worker_of(&of_host(host).ipv4(0, 0))).collect();
            assert_eq!(workers.len(), 5, "hosts");
            // A frame that ends before its header does goes to the first queue.
            assert_eq!(rig.queue_of(&flow(1, UDP).ipv4(0, 0)[..24]), 0);
        });
    }

    #[test]
    fn workers_come_and_go_and_flows_stay() {
        in_a_namespace(|| {
            let workers = |rig: &mut Rig, ports: std::ops::Range<u16>| {
                let flow = |port| Flow::new((port, 80), UDP).ipv4(0, 0);
                ports.map(|port| rig.worker_of(&flow(port))).collect::<Vec<_>>()
            };
            let number = |workers: &[usize]| workers.iter().collect::<BTreeSet<_>>().len();
            // From `before` workers to one more. Also on a device with one worker, the kernel knows which
            // flows go on.
            let one_comes = |rig: &mut Rig, before: usize, ports: std::ops::Range<u16>| loop {
                rig.steering.steer(&rig.queues[0], before).unwrap();
                rig.queues.truncate(before * BUCKETS);
                let begun = Instant::now();
                let those = workers(rig, ports.clone());
                assert_eq!(number(&those), before);
                let open = |_| Tap::open(&TapOptions::new("tap0")).unwrap();
                rig.queues.extend((0..BUCKETS).map(open));
                let untold = workers(rig, ports.clone());
                rig.steering.steer(&rig.queues[0], before + 1).unwrap();
                let after = workers(rig, ports.clone());
                // Else this thread got no processor for so long that they may have paused.
                if begun.elapsed() < PAUSE {
                    assert_eq!([untold, after], [those.clone(), those], "those that go on");
                    break;
                }
            };
            let mut rig = Rig::with_workers(2);
            one_comes(&mut rig, 2, 0..20);
            assert_eq!(number(&workers(&mut rig, 20..50)), 3, "those that begin");
            // Flows of workers that go come to the worker that stays.
            one_comes(&mut rig, 1, 0..50);
            assert_eq!(number(&workers(&mut rig, 50..80)), 2, "those that begin");
            rig.steering.steer(&rig.queues[0], TAP_WORKERS_MAX).unwrap();
            for number in [0, TAP_WORKERS_MAX + 1] {
                assert!(rig.steering.steer(&rig.queues[0], number).is_err());
            }
        });
    }

    #[test]
    fn flows_that_begin_at_once_are_shared_out() {
        in_a_namespace(|| {
            let mut rig = Rig::with_workers(3);
            let mut ports = 0..;
            // Begun within two ticks, else they are not at once: this thread got no processor.
            let counts = loop {
                let begun = tick();
                let mut counts = [0; 3];
                for port in ports.by_ref().take(9) {
                    counts[rig.worker_of(&Flow::new((port, 80), 6).ipv4(0, 0x4000))] += 1;
                }
                let passed = tick().wrapping_sub(begun);
                // Earlier flows no longer count as load.
                std::thread::sleep(Duration::from_nanos(u64::from(TICK_NS) * 5 / 2));
                if passed <= 1 {
                    break counts;
                }
            };
            assert_eq!(counts, [3; 3]);
            // So many that a tick's most is come to: the last ones change nothing.
            for port in ports.take(2_000) {
                rig.worker_of(&Flow::new((port, 80), 6).ipv4(0, 0x4000));
            }
        });
    }

    /// The program counts it as the engine does on a lane, whatever the load was and how old it is.
    #[test]
    fn a_flow_that_begins_is_added_to_its_workers_load() {
        // So few that each flow has a separate place, over more than a tick.
        const FLOWS: u16 = 30;
        let load_of = |now: u64, before: u64| before << TICK_LOAD_BITS | now;
        let some = load_of(700, 3);
        for (age, load) in [(0, some), (1, some), (2, some), (0, load_of(TICK_LOAD_MAX, 3))] {
            in_a_namespace(|| {
                let mut rig = Rig::with_workers(2);
                let exact = (0..FLOWS).filter(|port| {
                    let now = tick();
                    let stamp = u64::from(now.wrapping_sub(age) & LOAD_TICK_MAX);
                    let before = stamp << (2 * TICK_LOAD_BITS) | load;
                    let words = [0, LOAD_LEN / 8];
                    for word in words {
                        rig.steering.loads.words()[word].store(before, Relaxed);
                    }
                    let worker = rig.worker_of(&Flow::new((*port, 80), 6).ipv4(0, 0x4000));
                    let after = words.map(|word| rig.steering.loads.words()[word].load(Relaxed));
                    assert_eq!(after[1 - worker], before, "the other's");
                    let counted_at = |tick| {
                        let expected = AtomicU64::new(before);
                        // It counts a unit more, of the packet.
                        load::add(&expected, (load::PRESUMED_UNITS as u64 - 1) * 64, tick);
                        after[worker] == expected.into_inner()
                    };
                    std::thread::sleep(Duration::from_millis(1));
                    // The program's clock is behind by up to a tick of the kernel's, and time goes on.
                    let is_near = [now.wrapping_sub(1), now.wrapping_add(1)].map(counted_at);
                    let is_exact = counted_at(now);
                    // Else this thread got no processor for long.
                    let is_timely = tick().wrapping_sub(now) <= 1;
                    assert!(
                        !is_timely || is_exact || is_near.contains(&true),
                        "{before:x}: {:x}",
                        after[worker]
                    );
                    is_exact
                });
                assert!(exact.count() > 0, "{age} {load:x}");
            });
        }
    }

    #[test]
    fn new_flows_go_to_a_worker_with_much_less_load_and_others_stay() {
        in_a_namespace(|| {
            let mut rig = Rig::with_workers(3);
            let flow = |port| Flow::new((port, 80), 6).ipv4(0, 0x4000);
            let carried = |rig: &Rig, loads: [u64; 3]| {
                let now = tick();
                loads.iter().zip(0..).for_each(|(bytes, worker)| {
                    rig.steering.carried(worker, *bytes, now);
                });
                now
            };
            // A load is forgotten within two ticks: it is told again for each flow, and once more where this
            // thread got no processor.
            let begin = |rig: &mut Rig, loads, port: &mut dyn FnMut() -> u16| loop {
                let told = carried(rig, loads);
                let worker = rig.worker_of(&flow(port()));
                if tick().wrapping_sub(told) <= 1 {
                    break worker;
                }
            };
            let loads = [300_000, 1_000_000, 0];
            let paused = loop {
                let before: Vec<_> = (0..60).map(|port| rig.worker_of(&flow(port))).collect();
                let paused = (0..60).find(|port| before[usize::from(*port)] == 1).unwrap();
                let goes_on = |port: &u16| *port != paused;
                // Longer than a pause, a frame of each now and then, but of one.
                let begun = Instant::now();
                let mut looks = [begun; 2];
                let stalled = loop {
                    looks = [looks[1], Instant::now()];
                    carried(&rig, loads);
                    let stay = (0..60)
                        .filter(goes_on)
                        .all(|port| rig.worker_of(&flow(port)) == before[usize::from(port)]);
                    if looks[0].elapsed() >= PAUSE {
                        break true;
                    }
                    assert!(stay);
                    if begun.elapsed() > PAUSE * 5 / 4 {
                        break false;
                    }
                    std::thread::sleep(Duration::from_millis(10));
                };
                if !stalled {
                    break paused;
                }
                // This thread got no processor for so long that all have paused: they begin again.
                std::thread::sleep(PAUSE * 5 / 4);
            };
            assert_eq!(begin(&mut rig, loads, &mut || paused), 2, "it has paused");
            let mut ports = 100..;
            for (loads, expected) in [
                ([0, 0, 0], &[0, 1, 2][..]),
                ([0, 2_000, 0], &[0, 1, 2]),
                ([0, 1_000_000, 0], &[0, 2]),
                ([2_000_000, 800_000, 2_000_000], &[1]),
                ([2_000_000, 1_200_000, 2_000_000], &[0, 1, 2]),
                ([1_200_000, 2_000_000, 800_000], &[0, 2]),
            ] {
                std::thread::sleep(Duration::from_nanos(u64::from(TICK_NS) * 5 / 2));
                let mut next = || ports.next().unwrap();
                let workers: BTreeSet<_> =
                    (0..30).map(|_| begin(&mut rig, loads, &mut next)).collect();
                assert_eq!(workers, expected.iter().copied().collect(), "{loads:?}");
            }
            // A worker that there cannot be.
            rig.steering.carried(TAP_WORKERS_MAX, 1, tick());
        });
    }
}

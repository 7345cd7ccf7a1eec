//! Which queue of the switch's TAP device gets a frame: of those of its flow's worker, that of the bucket
//! in which the MAC address is that it comes from.

use std::io;
use std::os::fd::OwnedFd;

use super::{BUCKET_BITS, SPREAD, TAP_WORKERS_MAX};
use crate::bpf::{
    EXIT, Instruction, Width, add_register, and_value, jump, jump_if, jump_unless,
    jump_unless_zero, load, load_behind, load_program, move_register, move_value, multiply,
    multiply_32, shift_left, shift_right, shift_right_32,
};
use crate::tap::Tap;

/// Where a frame has its sender, and the protocol of what it carries.
const SENDER_AT: i32 = 6;
const ETHERTYPE_AT: i32 = 12;
/// Bytes before the IP header.
const ETHERNET_LEN: i32 = 14;
const BPF_PROG_TYPE_SOCKET_FILTER: u32 = 1;

/// Has the kernel hand each frame to the queue of its flow and its sender: of the queues of the device of
/// `member`, in the order in which they were opened, [`super::BUCKETS`] for each of so many `workers`. A flow's
/// worker is found by addresses and, of TCP and UDP but for fragments, ports, the same for both
/// directions; what is no IP, by the sender. Of the worker's queues it is the one with the number that
/// [`super::bucket_of_mac`] says; among several workers, what ends within its headers goes to the first queue.
///
/// Called again after a worker's queues were opened, and before the last worker's are closed.
///
/// # Errors
/// `InvalidInput`: not 1 to [`TAP_WORKERS_MAX`] workers. Else what the kernel refused: then it picks as
/// before; without ever having been told, the queue on which the flow's answers were written, or one by its
/// hash.
pub fn by_flow_and_sender(member: &Tap, workers: usize) -> io::Result<()> {
    if !(1..=TAP_WORKERS_MAX).contains(&workers) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    member.steer(&load_frame_program(workers as u32)?)
}

/// Whether the kernel takes what [`by_flow_and_sender`] gives it.
///
/// # Errors
/// A kernel without eBPF, or without the right to use it.
pub fn try_by_flow_and_sender() -> io::Result<()> {
    load_frame_program(2).map(drop)
}

fn load_frame_program(workers: u32) -> io::Result<OwnedFd> {
    load_program(BPF_PROG_TYPE_SOCKET_FILTER, b"weft_frames", &frame_program(workers))
}

/// Register 7 gets the number of the bucket, 8 the sum of what tells the flow.
fn frame_program(workers: u32) -> Vec<Instruction> {
    let mut program = vec![
        move_register(6, 1),
        load(Width::Word, SENDER_AT + 2),
        move_register(8, 0),
        move_register(7, 0),
        multiply_32(7, SPREAD),
        shift_right_32(7, u32::BITS - BUCKET_BITS),
    ];
    if workers > 1 {
        let [v6, mut v4] = [sum_ipv6(), sum_ipv4()];
        v4.push(jump(1 + over(&v6)));
        program.push(load(Width::Half, ETHERTYPE_AT));
        program.push(jump_unless(0, libc::ETH_P_IP, over(&v4)));
        program.extend(v4);
        program.push(jump_unless(0, libc::ETH_P_IPV6, over(&v6)));
        program.extend(v6);
    }
    program.extend([
        multiply_32(8, SPREAD),
        multiply(8, workers as i32),
        shift_right(8, u32::BITS),
        shift_left(8, BUCKET_BITS as i32),
        move_register(0, 7),
        add_register(0, 8),
        EXIT,
    ]);
    program
}

/// Puts what tells an IPv4 flow into register 8.
fn sum_ipv4() -> Vec<Instruction> {
    let ports = add_ports();
    let mut program = vec![move_value(8, 0)];
    program.extend([add_word(12), add_word(16)].concat());
    program.extend([
        load(Width::Byte, ETHERNET_LEN),
        and_value(0, 0x0f),
        shift_left(0, 2),
        move_register(9, 0),
        // Of fragments only the first has ports.
        load(Width::Half, ETHERNET_LEN + 6),
        and_value(0, 0x3fff),
        jump_unless_zero(0, 1 + over(&ports)),
        load(Width::Byte, ETHERNET_LEN + 9),
    ]);
    program.extend(ports);
    program
}

/// Puts what tells an IPv6 flow into register 8.
fn sum_ipv6() -> Vec<Instruction> {
    let mut program = vec![move_value(8, 0)];
    program.extend((8..40).step_by(4).flat_map(add_word));
    program.extend([move_value(9, 40), load(Width::Byte, ETHERNET_LEN + 6)]);
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
    [load(Width::Word, ETHERNET_LEN + at), add_register(8, 0)]
}

const fn over(instructions: &[Instruction]) -> i16 {
    instructions.len() as i16
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

    use super::super::BUCKETS;
    use super::*;
    use crate::namespace::run_in;
    use crate::tap::{FRAME_LEN_MAX, TapOptions, VNET_LEN};
    use crate::testing::{FrameSender, fresh_namespace, ip};

    const ONE: [u8; 6] = [2, 0, 0, 0, 0, 1];
    const TWO: [u8; 6] = [2, 0, 0, 0, 0, 2];
    const UDP: u8 = 17;

    /// Who talks to whom: addresses by their last bytes.
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

        /// A packet with so many words of options; `fragment` is the field of flags and offset.
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
        queues: Vec<Tap>,
        sender: FrameSender,
        buffer: Vec<u8>,
    }

    impl Rig {
        fn with_workers(workers: usize) -> Self {
            let options = TapOptions::new("tap0");
            let open = |_| Tap::open(&options).unwrap();
            let queues: Vec<_> = (0..workers * BUCKETS).map(open).collect();
            by_flow_and_sender(&queues[0], workers).unwrap();
            std::fs::write("/proc/sys/net/ipv6/conf/tap0/disable_ipv6", "1").unwrap();
            ip("link set tap0 arp off up");
            let sender = FrameSender::open("tap0");
            Self { queues, sender, buffer: vec![0; FRAME_LEN_MAX] }
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
    fn what_has_no_ports_goes_by_addresses_and_what_has_none_by_its_sender() {
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
            // What ends before its header does is the first queue's.
            assert_eq!(rig.queue_of(&flow(1, UDP).ipv4(0, 0)[..24]), 0);
        });
    }

    #[test]
    fn workers_come_and_go() {
        in_a_namespace(|| {
            let mut rig = Rig::with_workers(2);
            let workers = |rig: &mut Rig| {
                let flow = |port| Flow::new((port, 80), UDP).ipv4(0, 0);
                (0..20).map(|port| rig.worker_of(&flow(port))).collect::<BTreeSet<_>>().len()
            };
            assert_eq!(workers(&mut rig), 2);
            by_flow_and_sender(&rig.queues[0], 1).unwrap();
            rig.queues.truncate(BUCKETS);
            assert_eq!(workers(&mut rig), 1);
            rig.queues.extend((0..BUCKETS).map(|_| Tap::open(&TapOptions::new("tap0")).unwrap()));
            assert_eq!(workers(&mut rig), 1);
            by_flow_and_sender(&rig.queues[0], 2).unwrap();
            assert_eq!(workers(&mut rig), 2);
            for number in [0, TAP_WORKERS_MAX + 1] {
                assert!(by_flow_and_sender(&rig.queues[0], number).is_err());
            }
        });
    }
}

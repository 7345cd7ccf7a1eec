//! The kernel as referee of the userspace device's rules: they must refuse exactly what the kernel refuses,
//! with the same error number.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
};

use rustix::net::{AddressFamily, SocketType, bind, socket, sockopt::set_ipv6_v6only};
use weft_kernel::ovpn::OvpnError;
use weft_openvpn::device::{
    CipherAlgorithm, DeviceError, KeyAttributes, KeyDirection, Mode, PeerAttributes, Slot,
    rules::{self, Transport},
};

use crate::lab::{Carrier, DEVICE, Host, PORT, connection, hosts, key, peer, wait};

/// How many sets of attributes are tried in each place.
const CASES: usize = 1_500;
const ENOENT: i32 = 2;

/// Numbers that look random and are the same in each run (xorshift).
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit
    }

    fn one_of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())].clone()
    }

    /// Mostly the first.
    fn mostly<T: Clone>(&mut self, usual: T, others: &[T]) -> T {
        if self.below(10) < 7 { usual } else { self.one_of(others) }
    }
}

/// Disagreements between rules and kernel: how many, and one case.
#[derive(Default)]
struct Differences(BTreeMap<String, (usize, String)>);

impl Differences {
    fn compare(
        &mut self,
        place: &str,
        ours: Result<(), i32>,
        theirs: &Result<(), OvpnError>,
        case: &dyn std::fmt::Debug,
    ) {
        let number = theirs.as_ref().err().map(|error| error.errno().unwrap());
        if ours.err() != number {
            let text = theirs.as_ref().err().map(ToString::to_string).unwrap_or_default();
            let what = format!("{place}: rules {ours:?}, kernel {number:?} {text}");
            let entry = self.0.entry(what).or_insert_with(|| (0, format!("{case:?}")));
            entry.0 += 1;
        }
    }

    fn assert_none(&self) {
        for (what, (times, case)) in &self.0 {
            println!("{times} x {what}\n    {case}");
        }
        assert!(self.0.is_empty(), "rules and kernel differ: see above");
    }
}

fn attributes(dice: &mut Dice, mode: Mode, udp: bool, set: bool) -> PeerAttributes {
    let v4 = Some(Ipv4Addr::new(192, 0, 2, 2));
    let v6: Option<Ipv6Addr> = Some("2001:db8::2".parse().unwrap());
    let mapped: Option<Ipv6Addr> = Some("::ffff:192.0.2.2".parse().unwrap());
    let own_v4 = Some(Ipv4Addr::new(192, 0, 2, 1));
    let own_v6: Option<Ipv6Addr> = Some("2001:db8::1".parse().unwrap());
    let remote = dice.below(if udp { 12 } else { 40 });
    let both = dice.below(16) == 0;
    let vpn = mode == Mode::Mp && !set;
    PeerAttributes {
        id: dice.mostly(Some(1), &[Some(1), None, Some(1 << 24), Some(0xff_ffff)]),
        tx_id: dice.mostly(None, &[None, Some(9), Some(1 << 24)]),
        remote_ipv4: if remote < 5 || both { v4 } else { None },
        remote_ipv6: match remote {
            5..8 => v6,
            8..10 => mapped,
            _ => None,
        },
        remote_ipv6_scope_id: dice.mostly(None, &[None, Some(0), Some(3)]),
        remote_port: if remote < 10 {
            dice.mostly(Some(PORT), &[Some(PORT), None, Some(0)])
        } else {
            dice.mostly(None, &[None, Some(PORT)])
        },
        local_ipv4: dice.mostly(None, &[None, own_v4]),
        local_ipv6: dice.mostly(None, &[None, own_v6]),
        vpn_ipv4: dice.mostly(
            vpn.then(|| Ipv4Addr::new(10, 8, 0, 2)),
            &[None, Some(Ipv4Addr::new(10, 8, 0, 3))],
        ),
        vpn_ipv6: dice.mostly(None, &[None, Some("fd08::2".parse().unwrap())]),
        keepalive_interval_s: dice.mostly(None, &[None, Some(0), Some(5), Some(86_401)]),
        keepalive_timeout_s: dice.mostly(None, &[None, Some(0), Some(20), Some(86_401)]),
    }
}

/// A UDP socket with one family or both.
fn udp(host: &Host, ipv4: bool, ipv6: bool) -> Carrier {
    Carrier::Udp(host.space.within(|| {
        if !ipv6 {
            return UdpSocket::bind("0.0.0.0:1194").unwrap();
        }
        let socket = socket(AddressFamily::INET6, SocketType::DGRAM, None).unwrap();
        set_ipv6_v6only(&socket, !ipv4).unwrap();
        bind(&socket, &"[::]:1194".parse::<SocketAddr>().unwrap()).unwrap();
        socket.into()
    }))
}

/// Each mode with each socket.
fn places(mut body: impl FnMut(&Host, u32, &Carrier, Mode, Transport)) {
    let transports = [
        Transport::Udp { ipv4: true, ipv6: false },
        Transport::Udp { ipv4: true, ipv6: true },
        Transport::Udp { ipv4: false, ipv6: true },
        Transport::Tcp,
    ];
    for mode in [Mode::P2p, Mode::Mp] {
        for transport in transports {
            let [a, b] = hosts();
            let device = a.device(mode);
            let _other_end;
            let carrier = match transport {
                Transport::Udp { ipv4, ipv6 } => udp(&a, ipv4, ipv6),
                Transport::Tcp => {
                    let [here, there] = connection(&a, &b);
                    _other_end = there;
                    Carrier::Tcp(here)
                }
            };
            body(&a, device, &carrier, mode, transport);
        }
    }
}

fn number(result: Result<(), DeviceError>) -> Result<(), i32> {
    result.map_err(|error| error.errno())
}

#[test]
fn new_peers_are_refused_as_by_the_rules() {
    let mut differences = Differences::default();
    let mut taken = 0;
    places(|host, device, carrier, mode, transport| {
        let mut dice = Dice(0x5eed);
        for _ in 0..CASES {
            let udp = transport != Transport::Tcp;
            let case = attributes(&mut dice, mode, udp, false);
            let ours = match rules::new_peer(mode, transport, &case) {
                // The kernel accepts addresses that userspace could not send to.
                Ok(_) | Err(DeviceError::WrongFamily) => Ok(()),
                Err(error) => Err(error.errno()),
            };
            let theirs = wait(host.client.new_peer(device, carrier.fd(), &case));
            differences.compare(&format!("{mode} {transport:?}"), ours, &theirs, &case);
            if theirs.is_ok() {
                taken += 1;
                wait(host.client.delete_peer(device, case.id.unwrap())).unwrap();
            }
        }
    });
    println!("{taken} peers were made");
    differences.assert_none();
    assert!(taken > CASES / 10);
}

#[test]
fn changes_are_refused_as_by_the_rules() {
    let mut differences = Differences::default();
    let mut taken = 0;
    places(|host, device, carrier, mode, transport| {
        let mut dice = Dice(0x5eed);
        let family = match transport {
            Transport::Tcp => None,
            Transport::Udp { ipv4: true, .. } => Some("192.0.2.9:9"),
            Transport::Udp { .. } => Some("[2001:db8::9]:9"),
        };
        let mut new = peer(1, family.map(|text| text.parse().unwrap()));
        new.vpn_ipv4 = (mode == Mode::Mp).then(|| Ipv4Addr::new(10, 8, 0, 9));
        wait(host.client.new_peer(device, carrier.fd(), &new)).unwrap();
        for _ in 0..CASES {
            let udp = transport != Transport::Tcp;
            let case = attributes(&mut dice, mode, udp, true);
            let ours = match rules::peer_change(mode, &case) {
                Ok((0xff_ffff, _)) => Err(ENOENT),
                Ok((_, change)) => number(rules::change_fits(transport, &change)),
                Err(error) => number(Err(error)),
            };
            let theirs = wait(host.client.set_peer(device, &case));
            differences.compare(&format!("{mode} {transport:?}"), ours, &theirs, &case);
            taken += usize::from(theirs.is_ok());
        }
    });
    println!("{taken} changes were made");
    differences.assert_none();
    assert!(taken > CASES / 10);
}

#[test]
fn keys_are_refused_as_by_the_rules() {
    let [a, _b] = hosts();
    let device = a.device(Mode::P2p);
    let carrier = udp(&a, true, false);
    let remote = Some("192.0.2.2:1194".parse().unwrap());
    wait(a.client.new_peer(device, carrier.fd(), &peer(1, remote))).unwrap();
    let (mut differences, mut dice, mut taken) = (Differences::default(), Dice(0x5eed), 0);
    let lengths = [0, 1, 15, 16, 24, 31, 32, 33, 64, 256, 257, 300];
    for _ in 0..CASES {
        let usual = dice.one_of(&[16, 24, 32, 32]);
        let mut direction = || {
            let bytes = dice.mostly(usual, &lengths);
            let some = Some(KeyDirection { cipher_key: vec![7; bytes], nonce_tail: [1; 8] });
            dice.mostly(some, &[None])
        };
        let (encrypt, decrypt) = (direction(), direction());
        let cipher = [
            None,
            Some(CipherAlgorithm::None),
            Some(CipherAlgorithm::AesGcm),
            Some(CipherAlgorithm::ChaCha20Poly1305),
        ];
        let case = KeyAttributes {
            peer_id: dice.mostly(Some(1), &[None, Some(2), Some(1 << 24)]),
            slot: dice.mostly(Some(Slot::Primary), &[None, Some(Slot::Secondary)]),
            key_id: dice.mostly(Some(0), &[None, Some(7), Some(8)]),
            cipher: dice.mostly(Some(CipherAlgorithm::AesGcm), &cipher),
            encrypt,
            decrypt,
        };
        let ours = match rules::new_key(&case) {
            Ok(_) if case.peer_id == Some(2) => Err(ENOENT),
            Ok(new) => number(new.ciphers().map(|_| ())),
            Err(error) => number(Err(error)),
        };
        let theirs = wait(a.client.new_key(device, &case));
        differences.compare("key", ours, &theirs, &case);
        taken += usize::from(theirs.is_ok());
    }
    println!("{taken} keys were installed");
    differences.assert_none();
    assert!(taken > CASES / 50);
}

#[test]
fn sockets_and_devices_are_refused_by_their_numbers() {
    let [a, b] = hosts();
    let device = a.device(Mode::P2p);
    let free = udp(&a, true, false);
    let remote = peer(1, Some("192.0.2.2:1194".parse().unwrap()));
    let bare = peer(1, None);
    let mut wrong = Vec::new();
    let mut refused = |what: &str, device, fd: BorrowedFd<'_>, attributes, wanted: &DeviceError| {
        let theirs = wait(a.client.new_peer(device, fd, attributes));
        println!("{what}: {theirs:?}");
        let found = theirs.as_ref().err().and_then(OvpnError::errno);
        if found != Some(wanted.errno()) {
            wrong.push(format!("{what}: {found:?} and not {}", wanted.errno()));
        }
    };
    refused("no device", 9_999, free.fd(), &remote, &DeviceError::NoDevice);
    refused("loopback", 1, free.fd(), &remote, &DeviceError::WrongDevice);
    let file = std::fs::File::open("/proc/self/stat").unwrap();
    refused("a file", device, file.as_fd(), &remote, &DeviceError::NotASocket);
    let (unix, _other) = UnixStream::pair().unwrap();
    refused("a unix socket", device, unix.as_fd(), &remote, &DeviceError::NotASocket);
    let lonely: OwnedFd =
        a.space.within(|| socket(AddressFamily::INET, SocketType::STREAM, None).unwrap());
    refused(
        "a socket that is not connected",
        device,
        lonely.as_fd(),
        &bare,
        &DeviceError::NotASocket,
    );
    let spec =
        weft_kernel::ovpn::OvpnDeviceSpec { name: "tun8".into(), mode: Mode::Mp, own: false };
    let other = wait(a.kernel.create_ovpn_device(&spec)).unwrap().index;
    let mut at_other = remote.clone();
    at_other.vpn_ipv4 = Some(Ipv4Addr::new(10, 9, 0, 2));
    wait(a.client.new_peer(other, free.fd(), &at_other)).unwrap();
    refused("another device's socket", device, free.fd(), &remote, &DeviceError::SocketTaken);
    let encap = a.space.within(|| {
        weft_io::encap::EncapSocket::bind(weft_io::encap::Taker::Ipsec, None, 6785).unwrap()
    });
    let encap = encap.fds().next().unwrap();
    refused("a socket with ESP", device, encap, &remote, &DeviceError::SocketTaken);
    refused("the id of a peer", other, free.fd(), &at_other, &DeviceError::PeerExists(1));
    let second = PeerAttributes { id: Some(2), ..at_other.clone() };
    refused("the address of a peer", other, free.fd(), &second, &DeviceError::VpnAddressTaken);
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(
        b.space.succeeds("ip link show eth0")
            && !b.space.succeeds(&format!("ip link show {DEVICE}"))
    );
    let mut absent = key(1, Slot::Primary, 0, (CipherAlgorithm::AesGcm, 16), false);
    absent.peer_id = Some(77);
    let error = wait(a.client.new_key(other, &absent)).unwrap_err();
    assert_eq!(error.errno(), Some(DeviceError::NoPeer(77).errno()), "{error}");
}

//! The kernel as referee of the device in userspace. Given the same commands with the same attributes, both
//! must refuse the same ones, with the same numbers (`docs/design/ovpn.md`). Userspace must also say what was
//! wrong.

use std::fs::File;
use std::net::{Ipv4Addr, Ipv6Addr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType, socket};
use weft_io::encap::{EncapSocket, Taker};
use weft_lab::net::slowness;
use weft_openvpn::device::{
    CIPHER_KEY_BYTES_MAX, CipherAlgorithm, KEEPALIVE_MAX_S, KEY_ID_MAX, KeyAttributes,
    KeyDirection, Mode, PEER_ID_MAX, PeerAttributes, Slot,
};

use crate::lab::{DEVICE, Either, End, Kind, Outer, PORT, Refused, Two};

/// The number of ENODEV.
const NO_DEVICE: i32 = 19;
/// How long a device in userspace may take to find that it is gone, on a fast machine.
const GONE_LIMIT: Duration = Duration::from_secs(2);
/// The peer of either device, over UDP.
const FIRST: u32 = 1;
/// The peer over TCP that a device in mode mp has beside it.
const SECOND: u32 = 2;
/// The peer that a command makes.
const NEW: u32 = 5;
/// A peer that is never there.
const ABSENT: u32 = 77;
/// An id that no peer can have.
const BEYOND: u32 = PEER_ID_MAX + 1;

/// A command.
enum Ask {
    NewPeer(Socket, PeerAttributes),
    SetPeer(PeerAttributes),
    Peer(u32),
    DeletePeer(u32),
    NewKey(KeyAttributes),
    Key(u32, Slot),
    SwapKeys(u32),
    DeleteKey(u32, Slot),
}

impl Ask {
    fn given_to(&self, device: &Either, sockets: &[OwnedFd]) -> Result<(), Refused> {
        match self {
            Self::NewPeer(by, attributes) => device.new_peer(&sockets[*by as usize], attributes),
            Self::SetPeer(attributes) => device.set_peer(attributes),
            Self::Peer(id) => device.peer(*id).map(|_| ()),
            Self::DeletePeer(id) => device.delete_peer(*id),
            Self::NewKey(attributes) => device.new_key(attributes),
            Self::Key(id, slot) => device.key(*id, *slot).map(|_| ()),
            Self::SwapKeys(id) => device.swap_keys(*id),
            Self::DeleteKey(id, slot) => device.delete_key(*id, *slot),
        }
    }
}

/// The means by which a host reaches a peer, in the order of [`sockets`].
#[derive(Clone, Copy)]
enum Socket {
    /// For IPv4 only.
    Udp,
    /// The second peer's, in mode mp.
    Connection,
    /// An unused connection.
    Spare,
    /// The host's other device has it.
    Elsewhere,
    /// The kernel takes ESP out of it.
    Encapsulating,
    Unconnected,
    Listening,
    Unix,
    File,
}

fn sockets(end: &End, [connection, spare]: [OwnedFd; 2]) -> [OwnedFd; 9] {
    let any = (Ipv4Addr::UNSPECIFIED, 0_u16);
    let udp = || OwnedFd::from(end.within(|| UdpSocket::bind(any).unwrap()));
    let encap = end.within(|| EncapSocket::bind(Taker::Ipsec, Some(any.0.into()), 0).unwrap());
    let lonely = end.within(|| socket(AddressFamily::INET, SocketType::STREAM, None).unwrap());
    let listener = end.within(|| TcpListener::bind(any).unwrap());
    let (unix, _) = UnixStream::pair().unwrap();
    [
        udp(),
        connection,
        spare,
        udp(),
        encap.into_fds().swap_remove(0),
        lonely,
        OwnedFd::from(listener),
        OwnedFd::from(unix),
        OwnedFd::from(File::open("/proc/self/stat").unwrap()),
    ]
}

/// The expected result of a command.
#[derive(Clone, Copy, Debug)]
enum Comes {
    /// Both refuse, with the same number; the text of userspace names the fault.
    Refusal(&'static str),
    /// Both do it.
    Done,
    /// The kernel accepts a peer that it cannot send to; userspace refuses, with this text.
    RefusalInUserspace(&'static str),
}

impl Comes {
    fn is(self, kernels: &Result<(), Refused>, userspaces: &Result<(), Refused>) -> bool {
        let refused = userspaces.as_ref().err();
        let says = |word| refused.is_some_and(|refused| refused.text.contains::<&str>(word));
        match self {
            Self::Refusal(word) => kernels == userspaces && says(word),
            Self::Done => kernels.is_ok() && userspaces.is_ok(),
            Self::RefusalInUserspace(word) => kernels.is_ok() && says(word),
        }
    }
}

/// A description, a command and its expected result.
type Case = (String, Ask, Comes);

fn case(what: &str, ask: Ask, comes: Comes) -> Case {
    (what.to_owned(), ask, comes)
}

fn new(what: &str, by: Socket, attributes: PeerAttributes, comes: Comes) -> Case {
    (format!("a new peer: {what}"), Ask::NewPeer(by, attributes), comes)
}

fn set(what: &str, attributes: PeerAttributes, comes: Comes) -> Case {
    (format!("a change: {what}"), Ask::SetPeer(attributes), comes)
}

/// A peer over UDP that a device of this mode takes.
fn peer(mode: Mode, id: u32) -> PeerAttributes {
    let is_mp = mode == Mode::Mp;
    PeerAttributes {
        id: Some(id),
        remote_ipv4: Some(Ipv4Addr::new(192, 0, 2, 9)),
        remote_port: Some(PORT),
        vpn_ipv4: is_mp.then(|| Ipv4Addr::new(10, 8, 0, id as u8 + 10)),
        vpn_ipv6: is_mp.then(|| Ipv6Addr::new(0xfd08, 0, 0, 0, 0, 0, 0, id as u16 + 10)),
        ..PeerAttributes::default()
    }
}

/// The same without a remote address, as it is over TCP.
fn without_remote(mode: Mode, id: u32) -> PeerAttributes {
    PeerAttributes { remote_ipv4: None, remote_port: None, ..peer(mode, id) }
}

/// Over IPv6, for which the peers' socket is of no use.
fn over_ipv6(mode: Mode, id: u32) -> PeerAttributes {
    let remote_ipv6 = Some(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 9));
    PeerAttributes { remote_ipv4: None, remote_ipv6, ..peer(mode, id) }
}

fn direction(bytes: usize) -> Option<KeyDirection> {
    Some(KeyDirection { cipher_key: vec![7; bytes], nonce_tail: [1; 8] })
}

fn key(peer_id: u32) -> KeyAttributes {
    KeyAttributes {
        peer_id: Some(peer_id),
        slot: Some(Slot::Primary),
        key_id: Some(0),
        cipher: Some(CipherAlgorithm::AesGcm),
        encrypt: direction(32),
        decrypt: direction(32),
    }
}

type PeerFault = fn(&mut PeerAttributes);

/// Faults that neither a new peer nor a change may have.
const PEER_FAULTS: [(&str, PeerFault, &str); 12] = [
    ("no id", |peer| peer.id = None, "the peer's id"),
    ("an id that is too large", |peer| peer.id = Some(BEYOND), "peer id 16777216"),
    ("a large id to send", |peer| peer.tx_id = Some(BEYOND), "transmit id 16777216"),
    ("no port", |peer| peer.remote_port = None, "without a remote port"),
    ("port 0", |peer| peer.remote_port = Some(0), "port 0"),
    ("a port alone", |peer| peer.remote_ipv4 = None, "a remote port without"),
    ("two remotes", |peer| peer.remote_ipv6 = Some(Ipv6Addr::LOCALHOST), "a remote IPv6 address"),
    ("another local", |peer| peer.local_ipv6 = Some(Ipv6Addr::LOCALHOST), "a local address"),
    ("a scope of IPv4", |peer| peer.remote_ipv6_scope_id = Some(1), "a scope id"),
    ("a ping alone", |peer| peer.keepalive_interval_s = Some(5), "keepalive needs both"),
    ("a time-out alone", |peer| peer.keepalive_timeout_s = Some(5), "keepalive needs both"),
    (
        "a ping too seldom",
        |peer| {
            peer.keepalive_interval_s = Some(KEEPALIVE_MAX_S + 1);
            peer.keepalive_timeout_s = Some(KEEPALIVE_MAX_S);
        },
        "seconds 86401",
    ),
];

fn faults_of_peers(mode: Mode) -> Vec<Case> {
    let mut cases = Vec::new();
    for (what, fault, says) in PEER_FAULTS {
        let faulty = |id| {
            let mut attributes = peer(mode, id);
            fault(&mut attributes);
            attributes
        };
        cases.push(new(what, Socket::Udp, faulty(NEW), Comes::Refusal(says)));
        cases.push(set(what, faulty(FIRST), Comes::Refusal(says)));
    }
    cases
}

/// Cases that depend on the socket to a peer.
fn faults_of_sockets(mode: Mode) -> Vec<Case> {
    let (udp, tcp) = (peer(mode, NEW), without_remote(mode, NEW));
    let no_socket = Comes::Refusal("a UDP socket nor");
    let taken = Comes::Refusal("the socket serves");
    vec![
        new("no remote over UDP", Socket::Udp, tcp.clone(), Comes::Refusal("UDP")),
        new("a remote over TCP", Socket::Spare, udp.clone(), Comes::Refusal("TCP")),
        new("a file", Socket::File, udp.clone(), no_socket),
        new("a unix socket", Socket::Unix, tcp.clone(), no_socket),
        new("TCP that is not connected", Socket::Unconnected, tcp.clone(), no_socket),
        new("TCP that listens", Socket::Listening, tcp, no_socket),
        new("the socket of another device", Socket::Elsewhere, udp, taken),
    ]
}

const NO_FAMILY: Comes = Comes::RefusalInUserspace("family");

/// Cases that depend on the device's mode.
fn faults_of_mode(mode: Mode) -> Vec<Case> {
    if mode == Mode::P2p {
        let vpn_ipv4 = Some(Ipv4Addr::LOCALHOST);
        let with_vpn = |id| PeerAttributes { vpn_ipv4, ..peer(mode, id) };
        let says = Comes::Refusal("p2p");
        return vec![
            new("a VPN address", Socket::Udp, with_vpn(NEW), says),
            set("a VPN address", with_vpn(FIRST), says),
            set("a family that the socket lacks", over_ipv6(mode, FIRST), NO_FAMILY),
        ];
    }
    let (own, second) = (peer(mode, FIRST), peer(mode, SECOND));
    let nowhere = PeerAttributes { vpn_ipv4: None, vpn_ipv6: None, ..peer(mode, NEW) };
    let with_ipv4 = |id| PeerAttributes { vpn_ipv4: second.vpn_ipv4, ..peer(mode, id) };
    let with_ipv6 = |id| PeerAttributes { vpn_ipv6: second.vpn_ipv6, ..peer(mode, id) };
    let taken = Comes::Refusal("VPN address");
    let smallest = PeerAttributes { tx_id: Some(0), ..peer(mode, 0) };
    vec![
        new("the smallest id both ways", Socket::Udp, smallest, Comes::Done),
        new("an id that is there", Socket::Udp, own.clone(), Comes::Refusal("peer 1")),
        new("no VPN address", Socket::Udp, nowhere, taken),
        new("another's VPN IPv4 address", Socket::Udp, with_ipv4(NEW), taken),
        new("another's VPN IPv6 address", Socket::Udp, with_ipv6(NEW), taken),
        new("a family that the socket lacks", Socket::Udp, over_ipv6(mode, NEW), NO_FAMILY),
        new(
            "the connection of another peer",
            Socket::Connection,
            without_remote(mode, NEW),
            Comes::Refusal("the socket serves"),
        ),
        set("its own VPN addresses", own, Comes::Done),
        set("another's VPN IPv4 address", with_ipv4(FIRST), taken),
        set("another's VPN IPv6 address", with_ipv6(FIRST), taken),
        set("a remote over TCP", peer(mode, SECOND), Comes::Refusal("TCP")),
        set("a family that the socket lacks", over_ipv6(mode, FIRST), NO_FAMILY),
    ]
}

type KeyFault = fn(&mut KeyAttributes);

const KEY_FAULTS: [(&str, KeyFault, &str); 14] = [
    ("no peer", |key| key.peer_id = None, "the peer's id"),
    ("a peer's id that is too large", |key| key.peer_id = Some(BEYOND), "peer id 16777216"),
    ("an absent peer", |key| key.peer_id = Some(ABSENT), "no peer 77"),
    ("no slot", |key| key.slot = None, "the key's slot"),
    ("no id", |key| key.key_id = None, "the key's id"),
    ("an id that is too large", |key| key.key_id = Some(KEY_ID_MAX + 1), "key id 8"),
    ("no cipher", |key| key.cipher = None, "the key's cipher"),
    ("the cipher none", |key| key.cipher = Some(CipherAlgorithm::None), "cipher"),
    ("nothing to seal with", |key| key.encrypt = None, "encrypts"),
    ("nothing to open with", |key| key.decrypt = None, "decrypts"),
    ("too short to seal with", |key| key.encrypt = direction(15), "15 bytes"),
    ("too long to open with", |key| key.decrypt = direction(33), "33 bytes"),
    (
        "a length of the other cipher",
        |key| {
            key.cipher = Some(CipherAlgorithm::ChaCha20Poly1305);
            key.encrypt = direction(16);
        },
        "16 bytes",
    ),
    ("too long by far", |key| key.encrypt = direction(CIPHER_KEY_BYTES_MAX + 1), "bytes 257"),
];

fn faults_of_keys() -> Vec<Case> {
    let cases = KEY_FAULTS.into_iter().map(|(what, fault, says)| {
        let mut attributes = key(FIRST);
        fault(&mut attributes);
        (format!("a key: {what}"), Ask::NewKey(attributes), Comes::Refusal(says))
    });
    cases.collect()
}

/// Commands for peers and keys that do not exist.
fn absent(mode: Mode) -> Vec<Case> {
    let says = Comes::Refusal("no peer 77");
    let empty = Comes::Refusal("secondary slot of peer 1");
    vec![
        set("an absent peer", PeerAttributes { id: Some(ABSENT), ..Default::default() }, says),
        set("an absent peer's remote", peer(mode, ABSENT), says),
        case("an absent peer is read", Ask::Peer(ABSENT), says),
        case("an absent peer is deleted", Ask::DeletePeer(ABSENT), says),
        case("an absent peer's key is read", Ask::Key(ABSENT, Slot::Primary), says),
        case("an absent peer's keys are swapped", Ask::SwapKeys(ABSENT), says),
        case("an absent peer's key is deleted", Ask::DeleteKey(ABSENT, Slot::Primary), says),
        case("an empty slot is read", Ask::Key(FIRST, Slot::Secondary), empty),
        case("an empty slot is emptied", Ask::DeleteKey(FIRST, Slot::Secondary), Comes::Done),
    ]
}

/// Commands that look wrong but are right.
fn odd_but_right() -> Vec<Case> {
    let first = PeerAttributes { id: Some(FIRST), ..PeerAttributes::default() };
    let tx_id = |id| PeerAttributes { tx_id: Some(id), ..first.clone() };
    let keepalive = |interval_s, timeout_s| PeerAttributes {
        keepalive_interval_s: Some(interval_s),
        keepalive_timeout_s: Some(timeout_s),
        ..first.clone()
    };
    let swap =
        || case("keys are swapped of which one is missing", Ask::SwapKeys(FIRST), Comes::Done);
    let secondary = KeyAttributes { slot: Some(Slot::Secondary), ..key(FIRST) };
    let empty = Comes::Refusal("primary slot of peer 1");
    vec![
        swap(),
        case("the slot is read that had the key", Ask::Key(FIRST, Slot::Primary), empty),
        case("the slot is read that has it", Ask::Key(FIRST, Slot::Secondary), Comes::Done),
        swap(),
        case("a key with the id of the other slot's", Ask::NewKey(secondary), Comes::Done),
        case("the second of two is read", Ask::Key(FIRST, Slot::Secondary), Comes::Done),
        case("the second of two is deleted", Ask::DeleteKey(FIRST, Slot::Secondary), Comes::Done),
        set("the smallest id to send", tx_id(0), Comes::Done),
        set("the largest id to send", tx_id(PEER_ID_MAX), Comes::Done),
        set("its own id to send", tx_id(FIRST), Comes::Done),
        set("a ping and no time-out", keepalive(1, 0), Comes::Done),
        // It is none, or the peer would be gone before the end.
        set("a time-out and no ping", keepalive(0, 1), Comes::Done),
    ]
}

/// A device of each kind, in separate namespaces, with equal peers.
struct Stage {
    _others: [Either; 2],
    sockets: [[OwnedFd; 9]; 2],
    two: Two,
}

impl Stage {
    fn new(mode: Mode) -> Self {
        let two = Two::new([Kind::Kernel, Kind::Userspace], [mode; 2]);
        let [a, b] = two.connection(Outer::Tcp4);
        let [c, d] = two.connection(Outer::Tcp4);
        let sockets = [sockets(&two.a, [a, c]), sockets(&two.b, [b, d])];
        let others = [&two.a, &two.b].map(End::another_device);
        for ((end, other), sockets) in [&two.a, &two.b].into_iter().zip(&others).zip(&sockets) {
            let by = |socket: Socket| &sockets[socket as usize];
            other.new_peer(by(Socket::Elsewhere), &peer(Mode::P2p, FIRST)).unwrap();
            end.device.new_peer(by(Socket::Udp), &peer(mode, FIRST)).unwrap();
            end.device.new_key(&key(FIRST)).unwrap();
            if mode == Mode::Mp {
                let second = without_remote(mode, SECOND);
                end.device.new_peer(by(Socket::Connection), &second).unwrap();
            }
        }
        Self { _others: others, sockets, two }
    }

    fn ends(&self) -> [&End; 2] {
        [&self.two.a, &self.two.b]
    }

    /// The answers of the kernel and of userspace. Deletes any peer that a command made.
    fn ask(&self, ask: &Ask) -> [Result<(), Refused>; 2] {
        [0, 1].map(|at| {
            let device = &self.ends()[at].device;
            let answer = ask.given_to(device, &self.sockets[at]);
            if let (Ask::NewPeer(_, attributes), Ok(())) = (ask, &answer) {
                device.delete_peer(attributes.id.unwrap()).unwrap();
            }
            answer
        })
    }

    /// Gives both devices all commands; each result must be as expected.
    fn judge(&self, cases: Vec<Case>) {
        let mut differences = 0;
        for (what, ask, comes) in cases {
            let [kernels, userspaces] = self.ask(&ask);
            if comes.is(&kernels, &userspaces) {
                println!("{what}: {userspaces:?}");
            } else {
                differences += 1;
                println!("DIFFERENT, {what}: {comes:?}, but {kernels:?} and {userspaces:?}");
            }
        }
        assert_eq!(differences, 0, "the devices differ: see above");
    }

    /// Both tell the same of the first peer.
    fn assert_alike(&self) {
        let [kernels, userspaces] = self.ends().map(|end| {
            let state = end.device.peer(FIRST).unwrap();
            let key = end.device.key(FIRST, Slot::Primary).map(|key| (key.key_id, key.cipher));
            (state.id, state.tx_id, state.vpn_ipv4, state.vpn_ipv6, state.keepalive, key)
        });
        assert_eq!(kernels, userspaces);
    }
}

fn referee(mode: Mode) {
    let stage = Stage::new(mode);
    let tables = [
        odd_but_right(),
        faults_of_peers(mode),
        faults_of_sockets(mode),
        faults_of_keys(),
        absent(mode),
        faults_of_mode(mode),
    ];
    stage.judge(tables.into_iter().flatten().collect());
    stage.assert_alike();
}

#[test]
fn a_device_with_one_peer_refuses_what_the_kernels_does() {
    referee(Mode::P2p);
}

#[test]
fn a_device_with_many_peers_refuses_what_the_kernels_does() {
    referee(Mode::Mp);
}

#[test]
fn a_device_that_is_gone_refuses_everything_alike() {
    let stage = Stage::new(Mode::Mp);
    for end in stage.ends() {
        end.netns.ip(&format!("link del {DEVICE}")).unwrap();
    }
    // The one in userspace finds out by itself.
    let begun = Instant::now();
    let userspace = &stage.two.b.device;
    let is_gone = || userspace.peer(FIRST).is_err_and(|refused| refused.errno == Some(NO_DEVICE));
    while !is_gone() && begun.elapsed() < GONE_LIMIT * slowness() {
        std::thread::sleep(Duration::from_millis(20));
    }
    let says = Comes::Refusal("device");
    stage.judge(vec![
        new("a whole one", Socket::Udp, peer(Mode::Mp, NEW), says),
        set("nothing", PeerAttributes { id: Some(FIRST), ..Default::default() }, says),
        case("a peer is read", Ask::Peer(FIRST), says),
        case("a peer is deleted", Ask::DeletePeer(FIRST), says),
        case("a key is installed", Ask::NewKey(key(FIRST)), says),
        case("a key is read", Ask::Key(FIRST, Slot::Primary), says),
        case("keys are swapped", Ask::SwapKeys(FIRST), says),
        case("a key is deleted", Ask::DeleteKey(FIRST, Slot::Primary), says),
    ]);
}

/// Two faults in one command, ids that no peer can have, and a socket that is the kernel's already.
#[test]
fn faults_at_the_edges_are_refused_alike() {
    let stage = Stage::new(Mode::Mp);
    let mut short = key(ABSENT);
    short.encrypt = direction(15);
    let says = Comes::Refusal("16777216");
    let taken = Comes::Refusal("the socket serves");
    stage.judge(vec![
        new("a large id and a file", Socket::File, peer(Mode::Mp, BEYOND), says),
        case("a short key of an absent peer", Ask::NewKey(short), Comes::Refusal("no peer 77")),
        case("a peer beyond all is read", Ask::Peer(BEYOND), says),
        case("a peer beyond all is deleted", Ask::DeletePeer(BEYOND), says),
        case("a key of a peer beyond all is read", Ask::Key(BEYOND, Slot::Primary), says),
        case("the keys of a peer beyond all are swapped", Ask::SwapKeys(BEYOND), says),
        case("a key of a peer beyond all is deleted", Ask::DeleteKey(BEYOND, Slot::Primary), says),
        new("a socket that takes ESP", Socket::Encapsulating, peer(Mode::Mp, NEW), taken),
    ]);
}

//! The memory that a peer of a data channel device takes. By itself in its process, whose resident memory it
//! reads. Needs root and /dev/net/tun.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use weft_crypto::{Choice, Cipher, DataCipher, EpochSecret, Library, SizeClass, prefer};
use weft_engine::dco::{Device, DeviceConfig};
use weft_io::namespace::unshare_network;
use weft_openvpn::device::{
    CipherAlgorithm, EpochAttributes, KeyAttributes, KeyDirection, MTU_DEFAULT, Mode,
    PeerAttributes, Slot,
};

/// The limit for a further peer, in bytes of resident memory.
const PEER_BYTES_MAX: usize = 4 << 10;
const PEERS: u32 = 4_096;
/// Peers over TCP, each with two descriptors of this process, and those before whom all is made that is
/// made once.
const TCP_PEERS: u32 = 200;
const TCP_PEERS_BEFORE: u32 = 20;
/// Each peer's load: packets of the control channel behind their lengths, and a part of one more.
const CONTROL_PACKETS: usize = 300;
const CONTROL_BYTES: u16 = 1_200;
const PATIENCE: Duration = Duration::from_secs(60);

fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() << 10
}

fn add_peer(device: &Device, socket: &UdpSocket, id: u32) {
    let attributes = PeerAttributes {
        id: Some(id),
        remote_ipv4: Some(Ipv4Addr::from_bits(0x0b00_0000 + id)),
        remote_port: Some(1194),
        vpn_ipv4: Some(Ipv4Addr::from_bits(0x0a08_0000 + id)),
        ..PeerAttributes::default()
    };
    device.new_peer(socket.try_clone().unwrap().into(), &attributes).unwrap();
    add_key(device, id, Slot::Primary, 0);
}

fn add_key(device: &Device, peer: u32, slot: Slot, key_id: u32) {
    let direction = || Some(KeyDirection { cipher_key: vec![peer as u8; 32], nonce_tail: [1; 8] });
    let key = KeyAttributes {
        peer_id: Some(peer),
        slot: Some(slot),
        key_id: Some(key_id),
        cipher: Some(CipherAlgorithm::AesGcm),
        encrypt: direction(),
        decrypt: direction(),
    };
    device.new_key(&key).unwrap();
}

/// Epochs in the place of a peer's primary key.
fn add_epochs(device: &Device, peer: u32) {
    let secret = |way: u8| EpochSecret::from_bytes([peer as u8 ^ way; 32]);
    let epochs = EpochAttributes {
        peer_id: peer,
        slot: Slot::Primary,
        key_id: 0,
        cipher: DataCipher::Aes256Gcm,
        encrypt: secret(0),
        decrypt: secret(1),
    };
    device.new_epochs(epochs).unwrap();
}

/// Calls `give` for each peer, then prints and returns the memory that each peer takes.
fn measure(before: usize, what: &str, mut give: impl FnMut(u32)) -> usize {
    (1..=PEERS).for_each(&mut give);
    let each = resident().saturating_sub(before) / PEERS as usize;
    println!("measured: {each} bytes of memory a peer with {what}");
    each
}

/// Connects a peer, which sends its packets; returns its end.
fn add_tcp_peer(device: &Device, listener: &TcpListener, id: u32) -> TcpStream {
    let mut far = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (near, _) = listener.accept().unwrap();
    let vpn_ipv4 = Some(Ipv4Addr::from_bits(0x0a09_0000 + id));
    let attributes = PeerAttributes { id: Some(id), vpn_ipv4, ..PeerAttributes::default() };
    device.new_peer(near.into(), &attributes).unwrap();
    add_key(device, id, Slot::Primary, 0);
    let mut packet = CONTROL_BYTES.to_be_bytes().to_vec();
    // P_CONTROL_V1.
    packet.resize(packet.len() + usize::from(CONTROL_BYTES), 0x20);
    let mut all = packet.repeat(CONTROL_PACKETS);
    all.extend_from_slice(&packet[..500]);
    far.write_all(&all).unwrap();
    far
}

/// A connection gives back the room that it needed once.
fn a_further_peer_over_tcp_takes_as_little() {
    assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().unwrap().success());
    let came = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&came);
    let (name, mtu) = ("ovpn9".to_owned(), MTU_DEFAULT as u16);
    let config = DeviceConfig { name, mode: Mode::Mp, mtu, path_mtu: 1_280, offloads: true };
    let told = move |_| {
        count.fetch_add(1, Ordering::Relaxed);
    };
    let device = Device::open(&config, Arc::new(told)).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut far = Vec::new();
    let mut before = 0;
    for id in 0..TCP_PEERS_BEFORE + TCP_PEERS {
        if id == TCP_PEERS_BEFORE {
            before = resident();
        }
        far.push(add_tcp_peer(&device, &listener, id));
        let deadline = Instant::now() + PATIENCE;
        while came.load(Ordering::Relaxed) < far.len() * CONTROL_PACKETS {
            assert!(Instant::now() < deadline, "{} packets came", came.load(Ordering::Relaxed));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let each = resident().saturating_sub(before) / TCP_PEERS as usize;
    println!("measured: {each} bytes of memory a peer over TCP with one key");
    assert!(each > 500 && each < PEER_BYTES_MAX, "{each} bytes a peer over TCP");
}

#[test]
fn a_further_peer_takes_less_than_four_kib() {
    unshare_network().expect("this test makes a network namespace and must run as root");
    a_further_peer_over_tcp_takes_as_little();
    let mut open = Vec::new();
    // Outcomes of the race: one library has all, and each has a share.
    let mixed = Choice::default().with(SizeClass::Medium, Library::Ring);
    for (number, choice) in [Choice::default(), mixed].into_iter().enumerate() {
        prefer(Cipher::Aes256Gcm, choice, choice);
        let (name, mtu) = (format!("ovpn{number}"), MTU_DEFAULT as u16);
        let config = DeviceConfig { name, mode: Mode::Mp, mtu, path_mtu: 1_280, offloads: true };
        let device = Device::open(&config, Arc::new(|_| ())).unwrap();
        let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
        add_peer(&device, &socket, 0);
        let before = resident();
        let one = measure(before, "one key", |id| add_peer(&device, &socket, id));
        assert!(one > 500 && one < PEER_BYTES_MAX, "{one} bytes a peer with one key");
        assert_eq!(device.peers().unwrap().len(), PEERS as usize + 1);
        let second = |id| add_key(&device, id, Slot::Secondary, 1);
        let two = measure(before, "two keys", second);
        assert!(two > one && two < PEER_BYTES_MAX, "{two} bytes a peer with two keys");
        let epochs = measure(before, "epochs and a key", |id| add_epochs(&device, id));
        assert!(epochs > two && epochs < PEER_BYTES_MAX, "{epochs} bytes a peer with epochs");
        // Memory that a closed device gives back would hide the next one's use.
        open.push(device);
    }
}

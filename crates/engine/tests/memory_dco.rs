//! What a peer of a data channel device takes of memory. By itself in its process, whose resident memory
//! it reads. Needs root and /dev/net/tun.
#![allow(clippy::unwrap_used, clippy::print_stdout)]

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::Arc;

use weft_crypto::{Choice, Cipher, Library, SizeClass, prefer};
use weft_engine::dco::{Device, DeviceConfig};
use weft_io::namespace::unshare_network;
use weft_openvpn::device::{
    CipherAlgorithm, KeyAttributes, KeyDirection, MTU_DEFAULT, Mode, PeerAttributes, Slot,
};

/// What a further peer may take: bytes of resident memory.
const PEER_BYTES_MAX: usize = 4 << 10;
const PEERS: u32 = 4_096;

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

#[test]
fn a_further_peer_takes_less_than_four_kib() {
    // The more expensive outcome of the race: a key is held in the form of both libraries.
    let both = Choice::default().with(SizeClass::Medium, Library::Ring);
    prefer(Cipher::Aes256Gcm, both, both);
    unshare_network().expect("this test makes a network namespace and must run as root");
    let mtu = MTU_DEFAULT as u16;
    let config = DeviceConfig { name: "ovpn0".to_owned(), mode: Mode::Mp, mtu, offloads: true };
    let device = Device::open(&config, Arc::new(|_| ())).unwrap();
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    add_peer(&device, &socket, 0);
    let before = resident();
    for id in 1..=PEERS {
        add_peer(&device, &socket, id);
    }
    assert_eq!(device.peers().unwrap().len(), PEERS as usize + 1);
    let each = || resident().saturating_sub(before) / PEERS as usize;
    let with_one = each();
    println!("measured: {with_one} bytes of memory a peer with one key");
    assert!(with_one > 500, "{with_one} bytes: what is measured?");
    assert!(with_one < PEER_BYTES_MAX, "{with_one} bytes a peer with one key");
    for id in 1..=PEERS {
        add_key(&device, id, Slot::Secondary, 1);
    }
    let with_two = each();
    println!("measured: {with_two} bytes of memory a peer with two keys");
    assert!(
        with_two > with_one && with_two < PEER_BYTES_MAX,
        "{with_two} bytes a peer with two keys"
    );
}

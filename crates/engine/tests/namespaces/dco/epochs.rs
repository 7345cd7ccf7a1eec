//! Epochs as they go on: the device's other end is not a device, so that it can go on when it likes.

use std::net::UdpSocket;

use weft_crypto::DataCipher;
use weft_crypto::ovpn::{
    EPOCH_FUTURE, EPOCH_HEADER_BYTES, OpeningEpochs, SealingEpochs, TAG_BYTES,
};
use weft_engine::DropReason;
use weft_io::uninterrupted;
use weft_openvpn::device::{EpochAttributes, KeyBlock, Mode, Side, Slot};

use super::fuzzed::udp;
use super::host::{AES_256, Host, strangers};
use crate::common::PATIENCE;

/// DATA_V2 with key id 3, from the peer that the device knows as 2.
const WORD: [u8; 4] = [0x4b, 0, 0, 2];

/// A device's peer with epochs, and a program beside the device.
struct Peer {
    sealing: SealingEpochs,
    opening: OpeningEpochs,
    outside: UdpSocket,
    inside: UdpSocket,
}

impl Peer {
    fn new(a: &Host, b: &Host, cipher: DataCipher) -> Self {
        let (here, outside) = (a.socket(false), b.socket(false));
        outside.connect(here.local_addr().unwrap()).unwrap();
        a.meet(b, here.into(), Some(outside.local_addr().unwrap()), AES_256);
        let block = KeyBlock::new(std::array::from_fn(|at| at as u8 ^ 0x3c));
        let (encrypt, decrypt) = block.epoch_secrets(Side::Client);
        let (peer_id, slot, key_id) = (2, Slot::Primary, 3);
        let new = EpochAttributes { peer_id, slot, key_id, cipher, encrypt, decrypt };
        a.device.new_epochs(new).unwrap();
        let (encrypt, decrypt) = block.epoch_secrets(Side::Server);
        let inside = a.run(|| UdpSocket::bind((a.inner_v4(), 5_001)).unwrap());
        inside.connect((b.inner_v4(), 5_000)).unwrap();
        for socket in [&outside, &inside] {
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
        }
        let sealing = SealingEpochs::new(cipher, encrypt);
        Self { sealing, opening: OpeningEpochs::new(cipher, decrypt), outside, inside }
    }

    /// A packet of the current epoch with this text in it.
    fn sealed(&self, a: &Host, b: &Host, text: &[u8]) -> Vec<u8> {
        let plain = udp(b.inner_v4(), a.inner_v4(), text);
        let mut packet = vec![0; EPOCH_HEADER_BYTES];
        packet.extend_from_slice(&plain);
        packet.extend_from_slice(&[0; TAG_BYTES]);
        let mut reserved = self.sealing.current().reserve(1, WORD).unwrap();
        reserved.seal_in_place(&mut packet, plain.len()).unwrap();
        packet
    }

    /// Sends a packet, of which this text comes out at the program.
    fn arrives(&self, packet: &[u8], text: &[u8]) {
        self.outside.send(packet).unwrap();
        let mut got = [0; 2_000];
        let len = uninterrupted(|| self.inside.recv(&mut got)).unwrap();
        assert_eq!(&got[..len], text);
    }

    /// The program answers; returns the newest epoch that the device has sealed in.
    fn answered_in(&mut self) -> u16 {
        self.inside.send(b"an answer").unwrap();
        let mut got = [0; 2_000];
        let len = uninterrupted(|| self.outside.recv(&mut got)).unwrap();
        let plain = self.opening.open(&mut got[..len]).unwrap();
        assert!(got[plain].ends_with(b"an answer"));
        self.opening.epoch()
    }
}

#[test]
fn a_device_follows_into_the_next_epochs_and_opens_what_is_late_of_the_last() {
    for cipher in DataCipher::ALL {
        let (a, b) = strangers((Mode::Mp, Mode::P2p));
        let mut peer = Peer::new(&a, &b, cipher);
        let late = peer.sealed(&a, &b, b"late");
        peer.arrives(&peer.sealed(&a, &b, b"first"), b"first");
        assert_eq!(peer.answered_in(), 1, "{cipher}");
        let epoch = || a.device.key(2, Slot::Primary).unwrap().epoch;
        assert!(peer.sealing.advance());
        peer.arrives(&peer.sealed(&a, &b, b"second"), b"second");
        assert_eq!((epoch(), peer.answered_in()), (Some(2), 2), "{cipher}");
        peer.arrives(&late, b"late");
        // As far as it looks ahead, and not a step further.
        (0..EPOCH_FUTURE).for_each(|_| assert!(peer.sealing.advance()));
        peer.arrives(&peer.sealed(&a, &b, b"third"), b"third");
        assert_eq!((epoch(), peer.answered_in()), (Some(6), 6), "{cipher}");
        assert_eq!(a.drops(), [], "{cipher}");
        (0..=EPOCH_FUTURE).for_each(|_| assert!(peer.sealing.advance()));
        peer.outside.send(&peer.sealed(&a, &b, b"too far")).unwrap();
        a.wait_dropped(DropReason::TooOld, 1);
        assert_eq!((epoch(), peer.answered_in()), (Some(6), 6), "{cipher}");
    }
}

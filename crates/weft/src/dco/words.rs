//! Converts the words of the command line to a device's attributes.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use weft_api::{ApiError, ErrorKind};
use weft_crypto::DataCipher;
use weft_openvpn::device::{EpochAttributes, KeyAttributes, KeyBlock, PeerAttributes, Side};
use zeroize::Zeroizing;

use super::args::{CipherWord, KeyWords, PeerWords, SideWord};

pub(super) fn attributes(words: &PeerWords) -> PeerAttributes {
    let mut attributes = PeerAttributes {
        id: Some(words.peer),
        tx_id: words.tx_id,
        remote_port: words.remote.map(|remote| remote.port()),
        vpn_ipv4: words.vpn_ipv4,
        vpn_ipv6: words.vpn_ipv6,
        keepalive_interval_s: words.keepalive_interval,
        keepalive_timeout_s: words.keepalive_timeout,
        ..PeerAttributes::default()
    };
    match words.remote {
        Some(SocketAddr::V4(v4)) => attributes.remote_ipv4 = Some(*v4.ip()),
        Some(SocketAddr::V6(v6)) => {
            attributes.remote_ipv6 = Some(*v6.ip());
            attributes.remote_ipv6_scope_id = Some(v6.scope_id()).filter(|scope| *scope != 0);
        }
        None => {}
    }
    match words.local {
        Some(IpAddr::V4(v4)) => attributes.local_ipv4 = Some(v4),
        Some(IpAddr::V6(v6)) => attributes.local_ipv6 = Some(v6),
        None => {}
    }
    attributes
}

pub(super) fn read_key_block(file: &Path) -> Result<KeyBlock, ApiError> {
    let bad = |text: String| ApiError::new(ErrorKind::BadRequest, text);
    let text = std::fs::read_to_string(file).map(Zeroizing::new);
    let text = text.map_err(|error| bad(format!("cannot read {}: {error}", file.display())))?;
    KeyBlock::parse(&text).map_err(|error| bad(format!("{}: {error}", file.display())))
}

pub(super) fn fingerprint(words: &KeyWords, block: &KeyBlock) -> [u8; 32] {
    block.sealing_fingerprint(side(words.side))
}

pub(super) fn key(words: &KeyWords, block: &KeyBlock) -> KeyAttributes {
    let cipher = data_cipher(words.cipher);
    let (encrypt, decrypt) = block.directions(side(words.side), cipher.key_bytes());
    KeyAttributes {
        peer_id: Some(words.peer),
        slot: Some(words.slot),
        key_id: Some(words.key_id),
        cipher: Some(cipher.into()),
        encrypt: Some(encrypt),
        decrypt: Some(decrypt),
    }
}

pub(super) fn epochs(words: &KeyWords, block: &KeyBlock) -> EpochAttributes {
    let (encrypt, decrypt) = block.epoch_secrets(side(words.side));
    let KeyWords { peer, slot, key_id, .. } = *words;
    let cipher = data_cipher(words.cipher);
    EpochAttributes { peer_id: peer, slot, key_id, cipher, encrypt, decrypt }
}

pub(super) const fn data_cipher(word: CipherWord) -> DataCipher {
    match word {
        CipherWord::Aes128Gcm => DataCipher::Aes128Gcm,
        CipherWord::Aes192Gcm => DataCipher::Aes192Gcm,
        CipherWord::Aes256Gcm => DataCipher::Aes256Gcm,
        CipherWord::ChaCha20Poly1305 => DataCipher::ChaCha20Poly1305,
    }
}

const fn side(word: SideWord) -> Side {
    match word {
        SideWord::Client => Side::Client,
        SideWord::Server => Side::Server,
    }
}

//! SAs for tests and measurements: without limits, between two vector engines.

use std::time::Duration;

use weft_crypto::{Cipher, SaKey};
use weft_path::{Encapsulation, EngineKind, InboundSa, OutboundSa};

/// A key that seals nothing else.
fn key() -> SaKey {
    SaKey::from_bytes([3; 36])
}

pub(crate) fn inbound_sa(spi: u32) -> InboundSa {
    InboundSa {
        spi,
        lane: 0,
        cipher: Cipher::Aes256Gcm,
        key: key(),
        encapsulation: Encapsulation::Udp,
        remote_engine: EngineKind::Userspace,
        lifetime: Duration::MAX,
    }
}

pub(crate) fn outbound_sa(spi: u32) -> OutboundSa {
    OutboundSa {
        spi,
        lane: 0,
        cipher: Cipher::Aes256Gcm,
        key: key(),
        rco: true,
        iv_salt: 11,
        packets_soft: u64::MAX,
        packets_hard: u64::MAX,
        bytes_soft: u64::MAX,
        bytes_hard: u64::MAX,
        encapsulation: Encapsulation::Udp,
        remote_engine: EngineKind::Userspace,
        lifetime: Duration::MAX,
    }
}

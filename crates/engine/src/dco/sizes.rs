//! How large packets may be: inside a device, and on their way to a peer.

use std::sync::atomic::Ordering;

use weft_crypto::ovpn::EPOCH_OVERHEAD_BYTES;
use weft_io::tun;
use weft_io::udp::RUN_BYTES_MAX;

use super::Shared;
use super::transport::FRAME_PREFIX_LEN;

/// The largest IP packet that fits into a datagram with either layout's overhead, in bytes.
pub const MTU_MAX: u16 = (RUN_BYTES_MAX - EPOCH_OVERHEAD_BYTES - FRAME_PREFIX_LEN) as u16;

/// Headers of IPv6 and UDP around a packet to a peer, and the larger layout's overhead, in bytes.
const OUTER_IPV6_BYTES: u16 = 40 + 8 + EPOCH_OVERHEAD_BYTES as u16;

impl Shared {
    #[inline]
    pub(super) fn mtu(&self) -> u16 {
        self.mtu.load(Ordering::Relaxed)
    }

    /// The largest IP packet inside that gets through for certain, over IPv6 or not.
    #[inline]
    pub(super) fn room(&self, over_ipv6: bool) -> u16 {
        let mtu = self.mtu();
        if over_ipv6 { mtu.min(self.path_mtu - OUTER_IPV6_BYTES) } else { mtu }
    }

    /// Takes the TUN device's MTU over, if the system tells it; true if it is another than before.
    pub(super) fn follow_mtu(&self) -> bool {
        let Ok(now) = tun::mtu(self.index) else { return false };
        let now = u16::try_from(now).unwrap_or(u16::MAX).min(MTU_MAX);
        self.mtu.swap(now, Ordering::Relaxed) != now
    }
}

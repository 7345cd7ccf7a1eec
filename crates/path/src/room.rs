//! The largest packets between two hosts, from the MTUs of their links and containers.

use std::net::IpAddr;

use crate::config::{Config, MTU_FLOOR, overhead};
use crate::engine_api::EngineKind;
use crate::message::Hello;
use crate::pairing::Key;
use crate::prober::Sizes;

/// The MTUs that two hosts announced.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// Outer IP MTU of the narrower link, in bytes.
    pub(crate) outer: u16,
    /// The outer header is that of IPv6.
    pub(crate) ipv6: bool,
    /// Inner MTU of the peer's containers in bytes, if it says.
    pub(crate) containers: Option<u16>,
}

impl Room {
    /// Between this host and the one at `remote`.
    pub(crate) fn between(hello: &Hello, config: &Config, remote: IpAddr) -> Self {
        Self {
            outer: hello.mtu.min(config.link_mtu),
            ipv6: remote.is_ipv6(),
            containers: hello.container_mtu.map(|mtu| mtu.max(MTU_FLOOR)),
        }
    }

    /// The sizes to search on a path from containers with an MTU of `own` bytes. The peer's switch
    /// silently drops frames larger than its containers' MTU, so the path carries no more.
    pub(crate) fn sizes(&self, key: &Key, own: u16) -> Sizes {
        let links = self.outer.saturating_sub(overhead(key.format, key.encapsulation, self.ipv6));
        let Some(theirs) = self.containers.filter(|theirs| *theirs < own) else {
            return Sizes::new(own, links);
        };
        // A kernel cannot tell senders of the peer's size. It yields to the vector engine, which can,
        // where the peer's kernel would also take the frames. Towards a vector engine it stays in use
        // while the links carry all sizes, because it limits TCP segments.
        let yields = key.engine == EngineKind::Userspace
            || key.remote_engine == EngineKind::Kernel
            || links < own & !3;
        Sizes::new(if yields { own } else { theirs }, links.min(theirs))
    }
}

#[cfg(test)]
mod tests {
    use weft_crypto::Format;

    use super::*;
    use crate::engine_api::Encapsulation;

    const fn key(engine: EngineKind, remote_engine: EngineKind) -> Key {
        Key { engine, remote_engine, encapsulation: Encapsulation::Udp, format: Format::Esp }
    }

    #[test]
    fn a_path_carries_no_more_than_both_links_and_the_peers_containers_take() {
        use EngineKind::{Kernel, Userspace};
        let room = |containers| Room { outer: 1_500, ipv6: false, containers };
        let vector = key(Userspace, Userspace);
        for wider in [None, Some(1_388), Some(8_888)] {
            assert_eq!(room(wider).sizes(&vector, 1_388), Sizes::new(1_388, 1_408), "{wider:?}");
        }
        let narrower = room(Some(1_300));
        for pair in [vector, key(Userspace, Kernel), key(Kernel, Kernel)] {
            assert_eq!(narrower.sizes(&pair, 1_388), Sizes::new(1_388, 1_300), "{pair:?}");
        }
        let stays = narrower.sizes(&key(Kernel, Userspace), 1_388);
        assert_eq!(stays, Sizes::new(1_300, 1_300));
        let yields = Room { outer: 1_450, ..narrower };
        let carried = yields.sizes(&key(Kernel, Userspace), 1_388);
        assert_eq!(carried, Sizes::new(1_388, 1_300), "the links carry less, too");
        let links = Room { ipv6: true, ..room(Some(1_400)) };
        assert_eq!(links.sizes(&vector, 8_888), Sizes::new(8_888, 1_388));
    }
}

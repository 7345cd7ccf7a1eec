//! Traffic of network devices, the host's or a container's, as the kernel counts it.

use std::{collections::BTreeMap, path::Path};

use netlink_packet_route::{
    RouteNetlinkMessage,
    link::{LinkAttribute, LinkMessage, Stats64},
};

use crate::{error::KernelError, handle::Kernel, netlink::route::Socket};

/// The counters of one device since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkTraffic {
    /// Packets received; a super-packet is one.
    pub packets_received: u64,
    /// Bytes received, Ethernet headers included.
    pub bytes_received: u64,
    /// Packets sent.
    pub packets_sent: u64,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Packets dropped on the way in.
    pub dropped_received: u64,
    /// Packets dropped on the way out.
    pub dropped_sent: u64,
}

impl From<Stats64> for LinkTraffic {
    fn from(stats: Stats64) -> Self {
        Self {
            packets_received: stats.rx_packets,
            bytes_received: stats.rx_bytes,
            packets_sent: stats.tx_packets,
            bytes_sent: stats.tx_bytes,
            dropped_received: stats.rx_dropped,
            dropped_sent: stats.tx_dropped,
        }
    }
}

impl Kernel {
    /// The counters of every device of the host, by name, in one request.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub async fn link_traffic(&self) -> Result<BTreeMap<String, LinkTraffic>, KernelError> {
        traffic_of(self.socket()).await
    }

    /// The counters of every device in another network namespace, by name.
    ///
    /// # Errors
    /// [`KernelError::NamespaceGone`], or the kernel's refusal.
    pub async fn link_traffic_in(
        &self,
        namespace: &Path,
    ) -> Result<BTreeMap<String, LinkTraffic>, KernelError> {
        let opened = self.foreign_namespace(namespace)?;
        traffic_of(&self.socket_in(&opened, namespace)?).await
    }
}

async fn traffic_of(socket: &Socket) -> Result<BTreeMap<String, LinkTraffic>, KernelError> {
    let found = socket
        .dump(RouteNetlinkMessage::GetLink(LinkMessage::default()))
        .await
        .map_err(|error| error.while_doing("read the counters of the network devices"))?;
    Ok(found.into_iter().filter_map(named).collect())
}

fn named(message: RouteNetlinkMessage) -> Option<(String, LinkTraffic)> {
    let RouteNetlinkMessage::NewLink(message) = message else { return None };
    let (mut name, mut traffic) = (None, None);
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(text) => name = Some(text),
            LinkAttribute::Stats64(stats) => traffic = Some(stats.into()),
            _ => {}
        }
    }
    name.zip(traffic)
}

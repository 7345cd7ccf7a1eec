//! Traffic of containers' interfaces.

use weft_api::{ApiError, ContainerTraffic, Volume};
use weft_container::Sandbox;
use weft_engine::PortTraffic;

use super::{Attachments, Saved, kernel_refusal, mac_of};
use crate::devices::TAP;

impl Attachments {
    /// Traffic of each container's interface, without containers that are gone. The second value counts packets
    /// that the kernel dropped between the switch and the vector engine.
    pub(crate) async fn traffic(&self) -> Result<(Vec<ContainerTraffic>, u64), ApiError> {
        let links = self.kernel.link_traffic().await.map_err(kernel_refusal)?;
        let direct = self.ports.traffic();
        let saved: Vec<Saved> = self.lock_for_request().await?.saved.values().cloned().collect();
        let mut all = Vec::with_capacity(saved.len());
        for Saved { sandbox, attachment, host_interface, .. } in saved {
            let Some(link) = links.get(&host_interface) else { continue };
            let (direct, dropped) = match direct.get(&mac_of(&attachment)) {
                None => (PortTraffic::default(), 0),
                Some(direct) => {
                    (*direct, self.dropped_inside(&sandbox, &attachment.interface).await)
                }
            };
            all.push(ContainerTraffic {
                id: attachment.id,
                name: attachment.name,
                host_interface,
                // The host's end receives what the container sends.
                volume: Volume {
                    packets_received: link.packets_sent + direct.received.packets,
                    bytes_received: link.bytes_sent + direct.received.bytes,
                    packets_sent: link.packets_received + direct.sent.packets,
                    bytes_sent: link.bytes_received + direct.sent.bytes,
                },
                dropped: link.dropped_received + link.dropped_sent + dropped,
            });
        }
        Ok((all, links.get(TAP).map_or(0, |tap| tap.dropped_sent)))
    }

    /// Packets that the kernel dropped at a direct port, whose device is inside the container. Mostly these are
    /// packets sent while the engine's queue was full.
    async fn dropped_inside(&self, sandbox: &Sandbox, interface: &str) -> u64 {
        let links = self.kernel.link_traffic_in(&sandbox.namespace).await;
        // A container that is ending has no counters.
        let link = links.ok().and_then(|links| links.get(interface).copied()).unwrap_or_default();
        link.dropped_received + link.dropped_sent
    }
}

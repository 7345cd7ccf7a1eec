//! The remains after the process that holds a device was killed. A device in userspace is gone with it; the
//! kernel's stays, without peers.

use std::path::Path;

use tokio::runtime::{Builder, Runtime};
use weft_bench::sandbox::{Host, wait_until};
use weft_io::namespace::{Namespace, run_in};
use weft_kernel::ovpn::{OvpnClient, OvpnError, OvpnWatch, Watched};
use weft_openvpn::device::{DeletionReason, Notice, Notification};

use crate::common::{DEVICE, LIMIT, dco, has_device, limit, refused};

/// A second client of the kernel's device, with notifications, beside the process that holds it.
pub(crate) struct Witness {
    runtime: Runtime,
    client: OvpnClient,
    watch: OvpnWatch,
    index: u32,
}

impl Witness {
    /// `None` of a device in userspace.
    pub(crate) fn of(host: &Host) -> anyhow::Result<Option<Self>> {
        let shown = dco(host, &["get-iface", DEVICE])?;
        if shown["engine"] != "kernel" {
            return Ok(None);
        }
        let index = shown["ifindex"].as_u64().and_then(|index| u32::try_from(index).ok());
        let index = index.ok_or_else(|| anyhow::anyhow!("{shown}"))?;
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let space = Namespace::open(Path::new(&host.netns().path()))?;
        let open = || {
            runtime.block_on(async {
                Ok::<_, OvpnError>((OvpnClient::open().await?, OvpnWatch::open().await?))
            })
        };
        let (client, watch) = run_in(&space, open)??;
        Ok(Some(Self { runtime, client, watch, index }))
    }

    /// The kernel has told that this peer ended with its socket, and there is no other.
    fn has_seen_the_end_of(&mut self, peer_id: u32) -> anyhow::Result<()> {
        let Self { runtime, client, watch, index } = self;
        let next = async { tokio::time::timeout(limit(), watch.next()).await };
        let told = runtime.block_on(next)??;
        let what =
            Notification::PeerDeleted { peer_id, reason: DeletionReason::TransportDisconnect };
        anyhow::ensure!(told == Watched::Notice(Notice { device: *index, what }), "{told:?}");
        let left = runtime.block_on(client.peers(*index))?;
        anyhow::ensure!(left.is_empty(), "{left:?}");
        Ok(())
    }
}

/// Judges the remains on a host whose device had this one peer. Afterwards there is a device as before.
pub(crate) fn is_left(host: &Host, witness: Option<Witness>, peer_id: u32) -> anyhow::Result<()> {
    let nobody = refused(host, &["get-peer", DEVICE])?;
    let is_told = nobody.1.contains("no process holds") && nobody.1.contains("new-iface");
    anyhow::ensure!(nobody.0 == Some(4) && is_told, "{nobody:?}");
    if let Some(mut witness) = witness {
        witness.has_seen_the_end_of(peer_id)?;
        anyhow::ensure!(has_device(host, DEVICE)?, "the kernel's device is gone");
        let anew = refused(host, &["new-iface", DEVICE])?;
        let is_told = anew.1.contains("another name") && anew.1.contains("ip link del dco0");
        anyhow::ensure!(anew.0 == Some(5) && is_told, "{anew:?}");
        host.netns().ip(&format!("link del {DEVICE}"))?;
    } else {
        let is_gone = || has_device(host, DEVICE).is_ok_and(|has| !has);
        wait_until("the end of a device in userspace", LIMIT, is_gone)?;
    }
    dco(host, &["new-iface", DEVICE])?;
    anyhow::ensure!(has_device(host, DEVICE)?, "there is no device anew");
    Ok(())
}

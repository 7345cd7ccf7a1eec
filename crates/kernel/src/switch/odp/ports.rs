//! The datapath and its ports: observe, compare, apply.

use netlink_packet_route::link::InfoKind;
use rustix::io::Errno;
use weft_path::Vni;

use super::{
    api::{OdpEvent, OdpSpec},
    codec_flow::flush_flows,
    codec_port::{
        Datapath, PORT_INTERNAL, USER_FEATURES, VPORT_TYPE_INTERNAL, VPORT_TYPE_NETDEV, Vport,
        datapath, delete_datapath, delete_vport, dump_vports, get_datapath, new_datapath,
        new_vport, set_datapath, set_vport, vport,
    },
    device::{clear_name, ensure_internal, ensure_tunnel},
    socket::{Families, open_requests, upcall_port},
    state::Core,
    tables::PortKind,
};
use crate::{
    error::KernelError,
    handle::Kernel,
    net::link::{Link, check_name, is_datapath},
    netlink::{error::RequestError, generic::Requests},
};

/// How many numbers are tried for a new port.
const NUMBER_TRIES_MAX: usize = 4;

/// Makes the datapath and its devices, or takes over those of an earlier run of ours.
pub(super) async fn open_datapath(
    kernel: &Kernel,
    spec: &OdpSpec,
    requests: &mut Requests,
    families: &Families,
) -> Result<Datapath, KernelError> {
    let _one = kernel.inner.reconcile.lock().await;
    let found = match clear_name(kernel, &spec.name).await? {
        Some(link) => {
            let own = own_datapath(requests, families, &link).await?;
            Some(own.ok_or_else(|| link.name_taken("on this host"))?)
        }
        None => None,
    };
    ensure_tunnel(kernel, spec).await?;
    let datapath = match found {
        Some(datapath) => {
            let doing = "take over the datapath of an earlier run";
            let failed = |error: RequestError| error.while_doing(doing);
            if datapath.features != USER_FEATURES {
                let request = set_datapath(families.datapath, datapath.index);
                requests.run(request).await.map_err(failed)?;
            }
            let flush = flush_flows(families.flow, datapath.index);
            requests.run(flush).await.map_err(failed)?;
            datapath
        }
        None => create_datapath(requests, families, spec).await?,
    };
    ensure_internal(kernel, spec).await?;
    Ok(datapath)
}

async fn create_datapath(
    requests: &mut Requests,
    families: &Families,
    spec: &OdpSpec,
) -> Result<Datapath, KernelError> {
    let request = new_datapath(families.datapath, &spec.name, upcall_port(&spec.name, true));
    let doing = || format!("make the datapath {}", spec.name);
    let made = requests.run(request).await.map_err(|error| error.while_doing(doing()))?;
    let made = made.first().and_then(|body| datapath(body));
    made.ok_or_else(|| RequestError::TimedOut.while_doing(doing()))
}

/// The datapath of this internal device, if it is ours.
async fn own_datapath(
    requests: &mut Requests,
    families: &Families,
    link: &Link,
) -> Result<Option<Datapath>, KernelError> {
    let failed = |error: RequestError| error.while_doing(format!("read datapath {}", link.name));
    let found = match requests.run(get_datapath(families.datapath, &link.name)).await {
        // The device is a port of a datapath of another name.
        Err(error) if error.is(Errno::NODEV) => return Ok(None),
        other => other.map_err(failed)?,
    };
    let Some(datapath) = found.first().and_then(|body| datapath(body)) else { return Ok(None) };
    if link.is_own() {
        return Ok(Some(datapath));
    }
    // A run that was killed before it could mark the device.
    let ports = requests.dump(dump_vports(families.vport, datapath.index)).await.map_err(failed)?;
    let tag = upcall_port(&link.name, true);
    let tagged = |port: &Vport| port.number == PORT_INTERNAL && port.upcall_ports.contains(&tag);
    let ours = ports.iter().filter_map(|body| vport(body)).any(|port| tagged(&port));
    Ok(ours.then_some(datapath))
}

/// Deletes the ODP switch `name`, running or not (after `kill -9`, by `weft stop`). It deletes the datapath,
/// its tunnel's device and every device of ours that is a port; each container end goes with its host end.
/// Returns how many devices it deleted. Devices of others only lose the datapath.
///
/// # Errors
/// [`KernelError::NameTaken`] if the datapath is not ours (nothing is deleted then), or the kernel's
/// refusal.
pub async fn remove_datapath(
    kernel: &Kernel,
    name: &str,
    tunnel: &str,
) -> Result<usize, KernelError> {
    check_name(name)?;
    let _one = kernel.inner.reconcile.lock().await;
    let socket = kernel.socket();
    let mut deleted = 0;
    if let Some(link) = socket.link(name).await?.filter(is_datapath) {
        let mut requests = kernel.at_home(open_requests)?;
        let families = requests.families().await?;
        let Some(datapath) = own_datapath(&mut requests, &families, &link).await? else {
            return Err(link.name_taken("on this host"));
        };
        let ours = |port: &Link| port.is_own() && port.kind == Some(InfoKind::Veth);
        for port in socket.links().await? {
            if port.master == Some(link.index) && ours(&port) {
                socket.delete_link(&port).await?;
                deleted += 1;
            }
        }
        match requests.run(delete_datapath(families.datapath, datapath.index)).await {
            Err(error) if !error.is(Errno::NODEV) => {
                return Err(error.while_doing(format!("delete the datapath {name}")));
            }
            _ => deleted += 1,
        }
    }
    let vxlan = |link: &Link| link.is_own() && link.kind == Some(InfoKind::Vxlan);
    if let Some(link) = socket.link(tunnel).await?.filter(vxlan) {
        socket.delete_link(&link).await?;
        deleted += 1;
    }
    Ok(deleted)
}

impl Core {
    /// Lists the ports, records them, and adds the missing ones.
    pub(super) async fn reconcile(&mut self) -> Result<(), KernelError> {
        let vports = self.list_vports().await?;
        let gone = |number: u32, name: &str| {
            !vports.iter().any(|port| port.number == number && port.name == name)
        };
        let gone: Vec<(u32, String)> = self
            .tables
            .ports()
            .filter(|(number, name)| gone(*number, name))
            .map(|(number, name)| (number, name.to_owned()))
            .collect();
        for (number, name) in gone {
            self.tables.remove_port(number);
            if self.wanted.contains_key(&name) {
                self.event(OdpEvent::PortLost { name });
            }
        }
        for port in &vports {
            self.adopt(port).await?;
        }
        let absent = |name: &&String| !vports.iter().any(|port| port.name == **name);
        let absent: Vec<String> = self.wanted.keys().filter(absent).cloned().collect();
        self.missing.retain(|name, _| absent.contains(name));
        for name in absent {
            self.restore(&name).await;
        }
        self.make_meters().await;
        self.refresh().await;
        Ok(())
    }

    /// The same, and the devices besides.
    pub(super) async fn reconcile_all(&mut self) -> Result<(), KernelError> {
        {
            let kernel = self.kernel.clone();
            let _one = kernel.inner.reconcile.lock().await;
            ensure_tunnel(&kernel, &self.spec).await?;
            ensure_internal(&kernel, &self.spec).await?;
        }
        self.reconcile().await
    }

    async fn list_vports(&mut self) -> Result<Vec<Vport>, KernelError> {
        let found = self.requests.dump(dump_vports(self.families.vport, self.datapath)).await;
        self.watch_for_end(&found);
        let found = found.map_err(|error| error.while_doing("list the datapath's ports"))?;
        Ok(found.iter().filter_map(|body| vport(body)).collect())
    }

    /// Records an existing port, no matter which program added it. Leaves out tunnels that are not ours:
    /// their frames would be taken for a container's.
    async fn adopt(&mut self, port: &Vport) -> Result<(), KernelError> {
        let kind = match self.wanted.get(&port.name) {
            Some(kind) => *kind,
            None if [VPORT_TYPE_NETDEV, VPORT_TYPE_INTERNAL].contains(&port.kind) => {
                self.found_kind(port).await?
            }
            None => return Ok(()),
        };
        let wanted = upcall_port(&port.name, port.number == PORT_INTERNAL);
        if port.upcall_ports != [wanted] {
            let request = set_vport(self.families.vport, self.datapath, port.number, wanted);
            let done = self.requests.run(request).await;
            self.watch_for_end(&done);
            done.map_err(|error| error.while_doing(format!("take over port {}", port.name)))?;
        }
        self.tables.add_port(port.number, &port.name, kind);
        Ok(())
    }

    /// The kind of a port that nobody has asked for. Another program's is on the first network. One of ours,
    /// which an earlier run left, may have been on any.
    async fn found_kind(&mut self, port: &Vport) -> Result<PortKind, KernelError> {
        if self.tables.port_number(&port.name) == Some(port.number)
            && let Some(known) = self.tables.port_kind(port.number)
        {
            return Ok(known);
        }
        let link = self.kernel.socket().link(&port.name).await?;
        if link.is_some_and(|link| !link.is_own()) {
            return Ok(PortKind::Local(Vni(self.spec.vni)));
        }
        tracing::debug!(port = port.name, "a port of an earlier run waits for its network");
        Ok(PortKind::Unclaimed)
    }

    /// Adds a wanted port again, if its device is there.
    async fn restore(&mut self, name: &str) {
        match self.plug(name).await {
            Ok(()) => {
                self.missing.remove(name);
                self.event(OdpEvent::PortAdded { name: name.to_owned() });
            }
            Err(error) => {
                let why = error.to_string();
                let before = self.missing.insert(name.to_owned(), why.clone());
                if before.as_ref() != Some(&why) {
                    tracing::info!(port = name, %why, "a port of the ODP switch is missing");
                }
            }
        }
    }

    /// Makes a wanted device a port.
    pub(super) async fn plug(&mut self, name: &str) -> Result<(), KernelError> {
        let kind = self.wanted.get(name).copied().unwrap_or(PortKind::Unclaimed);
        let kernel = self.kernel.clone();
        let socket = kernel.socket();
        if kind == PortKind::Tunnel {
            let _one = kernel.inner.reconcile.lock().await;
            ensure_tunnel(&kernel, &self.spec).await?;
        }
        let link = socket.need_link(name).await?;
        if let Some(master) = link.master.filter(|master| *master != self.datapath) {
            let other = socket.link_by_index(master).await?;
            let bridge = other.map_or_else(|| format!("number {master}"), |other| other.name);
            return Err(KernelError::PortTaken { port: link.name, bridge });
        }
        let made = match self.new_port(name).await {
            Err(error) if error.is(Errno::NODEV) && socket.link(name).await?.is_none() => {
                return Err(KernelError::LinkMissing { name: name.to_owned() });
            }
            // It is a port already.
            Err(error) if error.is(Errno::EXIST) => {
                let found = self.list_vports().await?;
                found.into_iter().find(|port| port.name == name).ok_or_else(|| {
                    KernelError::PortTaken { port: name.to_owned(), bridge: "unknown".to_owned() }
                })?
            }
            other => {
                self.watch_for_end(&other);
                let doing = || format!("make {name} a port of the datapath {}", self.spec.name);
                let made = other.map_err(|error| error.while_doing(doing()))?;
                let made = made.first().and_then(|body| vport(body));
                made.ok_or_else(|| RequestError::TimedOut.while_doing(doing()))?
            }
        };
        self.tables.add_port(made.number, name, kind);
        Ok(())
    }

    /// Makes a port in the kernel, under a number of the tables' choice. A number that another program has taken
    /// meanwhile is passed over.
    async fn new_port(&mut self, name: &str) -> Result<Vec<Vec<u8>>, RequestError> {
        let mut tries = 1;
        loop {
            let (family, number) = (self.families.vport, self.tables.next_number());
            let upcalls = upcall_port(name, false);
            let request = new_vport(family, self.datapath, number, name, upcalls);
            match self.requests.run(request).await {
                Err(error) if error.is(Errno::BUSY) && tries < NUMBER_TRIES_MAX => tries += 1,
                made => return made,
            }
        }
    }

    pub(super) async fn add_port(&mut self, vni: u32, name: &str) -> Result<(), KernelError> {
        let kind = PortKind::Local(self.network(vni)?);
        let before = self.wanted.get(name).copied();
        if before != Some(kind) && self.is_own(name) {
            return Err(self.port_taken(name));
        }
        match self.tables.port_number(name) {
            Some(number) if self.tables.port_kind(number) == Some(PortKind::Unclaimed) => {
                self.tables.add_port(number, name, kind);
            }
            Some(number) if self.tables.port_kind(number) != Some(kind) => {
                // Flows of the other network end with the old port's number.
                self.tables.unpin_port(name);
                self.unplug(number, name).await?;
            }
            _ => {}
        }
        self.wanted.insert(name.to_owned(), kind);
        let plugged = match self.tables.port_number(name) {
            Some(_) => Ok(()),
            None => self.plug(name).await,
        };
        match &plugged {
            Ok(()) => _ = self.missing.remove(name),
            Err(_) if before.is_none() => _ = self.wanted.remove(name),
            Err(_) => {}
        }
        self.make_meters().await;
        self.refresh().await;
        plugged
    }

    pub(super) async fn remove_port(&mut self, name: &str) -> Result<bool, KernelError> {
        if self.is_own(name) {
            return Ok(false);
        }
        let wanted = self.wanted.remove(name).is_some();
        self.missing.remove(name);
        self.tables.unpin_port(name);
        let number = self.tables.port_number(name);
        let done = match number {
            Some(number) => self.unplug(number, name).await,
            None => Ok(()),
        };
        self.refresh().await;
        done.map(|()| wanted || number.is_some())
    }

    /// Whether the switch itself needs this port: it is the host's, the tunnel's or a TAP.
    fn is_own(&self, name: &str) -> bool {
        name == self.spec.name
            || matches!(self.wanted.get(name), Some(PortKind::Tap(_) | PortKind::Tunnel))
    }

    pub(super) async fn unplug(&mut self, number: u32, name: &str) -> Result<(), KernelError> {
        let request = delete_vport(self.families.vport, self.datapath, number);
        match self.requests.run(request).await {
            // It went with its device.
            Err(error) if !error.is(Errno::NODEV) => {
                return Err(error.while_doing(format!("take port {name} out of the datapath")));
            }
            _ => self.tables.remove_port(number),
        }
        Ok(())
    }

    pub(super) async fn retain_ports(&mut self, names: &[String]) -> Result<usize, KernelError> {
        let kept = |name: &&str| names.iter().any(|kept| kept == name) || self.is_own(name);
        let surplus = self.tables.ports().map(|(_, name)| name).filter(|name| !kept(name));
        let surplus: Vec<String> = surplus.map(str::to_owned).collect();
        let mut removed = 0;
        for name in surplus {
            let link = self.kernel.socket().link(&name).await?;
            let ours = |link: &Link| link.is_own() && link.kind == Some(InfoKind::Veth);
            if link.as_ref().is_none_or(ours) && self.remove_port(&name).await? {
                removed += 1;
            }
        }
        Ok(removed)
    }
}

//! The services beside the core, each under the supervisor.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use weft_api::Attachment;
use weft_kernel::engine::KernelEngine;
use weft_kernel::{HostRoute, Kernel, LinkEvent};
use weft_path::Vni;

use crate::devices::{EXPOSED_INTERFACE, SWITCH, TAP, exposed_on};
use crate::http::daemon::Daemon;
use crate::services::attach::loops::tell_of_rounds;
use crate::services::attach::mend::keep_interfaces;
use crate::services::attach::{
    Attachments, EXPOSE, bypass, kept, learned, port_locks, shortcuts, way_out,
};
use crate::services::resolved::Interfaces;
use crate::services::supervisor::{Pulse, Supervisor};
use crate::services::{cni, docker, gateway, names, networks, resolved};
use crate::upkeep::forward::keep_accepted;
use crate::upkeep::mtu::{WATCH_RETRY_MS, follow_link_mtu};

/// Starts a service. Each run of it gets clones of the parts.
macro_rules! start {
    ($all:ident, $name:literal, [$($part:ident),*], $service:expr) => {{
        $(let $part = $part.clone();)*
        $all.start($name, move |pulse| {
            $(let $part = $part.clone();)*
            $service(pulse)
        });
    }};
}

/// Starts all services. They end with the supervisor.
pub(super) fn start(daemon: &Arc<Daemon>, kernel: &Kernel, engine: &KernelEngine) -> Supervisor {
    let mut all = Supervisor::new(daemon.services.clone(), daemon.health.clone());
    start_attachments(&mut all, daemon, kernel, engine);
    start_runtimes(&mut all, daemon);
    start_gateway(&mut all, daemon);
    start_names(&mut all, daemon, kernel);
    start_upkeep(&mut all, daemon, kernel, engine);
    all
}

/// The networks of this host and its attachments.
fn start_attachments(
    all: &mut Supervisor,
    daemon: &Arc<Daemon>,
    kernel: &Kernel,
    engine: &KernelEngine,
) {
    let attachments = Arc::clone(&daemon.attachments);
    start!(all, "interfaces", [kernel, engine, attachments], |pulse| {
        watch_interfaces(kernel, engine, attachments, pulse)
    });
    start!(all, "networks", [daemon, attachments], |pulse| {
        let plug_in = move |vni| {
            let attachments = Arc::clone(&attachments);
            async move { attachments.plug_in_on(vni).await }
        };
        networks::keep(Arc::clone(&daemon.networks), plug_in, pulse)
    });
    start!(all, "shortcuts", [attachments], |pulse| shortcuts::keep_all(attachments, pulse));
    start!(all, "bypass", [attachments], |pulse| bypass::keep_looking(attachments, pulse));
    start!(all, "retries", [attachments], |pulse| kept::keep_trying(attachments, pulse));
    start!(all, "mending", [kernel, attachments], |pulse| {
        keep_interfaces(kernel, attachments, pulse)
    });
    start!(all, "way out", [kernel, attachments], |pulse| {
        way_out::keep(kernel, attachments, pulse)
    });
    start!(all, "loops", [daemon, attachments], |pulse| {
        tell_of_rounds(attachments, daemon.warnings.clone(), pulse)
    });
    start!(all, "port lock", [daemon, attachments], |pulse| {
        port_locks::keep(attachments, daemon.warnings.clone(), pulse)
    });
    start!(all, "addresses behind ports", [attachments], |pulse| {
        learned::keep(attachments, pulse)
    });
}

/// The faces to container runtimes.
fn start_runtimes(all: &mut Supervisor, daemon: &Arc<Daemon>) {
    start!(all, "cni", [daemon], |pulse| cni::serve(Arc::clone(&daemon.cni), pulse));
    start!(all, "docker plugin", [daemon], |pulse| {
        docker::serve(Arc::clone(&daemon.docker), pulse)
    });
    start!(all, "docker events", [daemon], |pulse| {
        docker::follow_events(Arc::clone(&daemon.docker), pulse)
    });
    start!(all, "docker lists", [daemon], |pulse| {
        docker::keep_comparing(Arc::clone(&daemon.docker), pulse)
    });
}

/// The gateway for OpenVPN clients.
fn start_gateway(all: &mut Supervisor, daemon: &Arc<Daemon>) {
    start!(all, "gateway", [daemon], |pulse| gateway::keep(Arc::clone(&daemon.gateway), pulse));
    start!(all, "configured gateway", [daemon], |pulse| {
        gateway::keep_section(Arc::clone(&daemon.gateway), pulse)
    });
    start!(all, "client names", [daemon], |pulse| {
        gateway::keep_names(Arc::clone(&daemon.gateway), pulse)
    });
    start!(all, "gateway peers", [daemon], |pulse| {
        gateway::keep_peers(Arc::clone(&daemon.gateway), pulse)
    });
}

/// DNS, for containers and for the host.
fn start_names(all: &mut Supervisor, daemon: &Arc<Daemon>, kernel: &Kernel) {
    let attachments = Arc::clone(&daemon.attachments);
    start!(all, "names", [daemon], |pulse| {
        names::serve(Arc::clone(&daemon.names), daemon.control.clone(), pulse)
    });
    start!(all, "dns addresses", [daemon, attachments], |pulse| {
        names::exposed::follow(Arc::clone(&daemon.names), attachments.shown(), pulse)
    });
    start!(all, "host dns", [daemon, kernel, attachments], |pulse| {
        let shown = attachments.shown();
        let look = move || interfaces_on_networks(kernel.clone(), Arc::clone(&shown.borrow()));
        resolved::keep(Arc::clone(&daemon.resolved), look, pulse)
    });
}

/// This daemon's files, and its rules and devices on the host.
fn start_upkeep(
    all: &mut Supervisor,
    daemon: &Arc<Daemon>,
    kernel: &Kernel,
    engine: &KernelEngine,
) {
    let switch = engine.switch();
    start!(all, "state files", [daemon], |pulse| keep_saving(daemon, pulse));
    start!(all, "routes", [daemon, kernel], |pulse| watch_routes(daemon, kernel, pulse));
    start!(all, "forward rule", [daemon, kernel], |pulse| {
        keep_accepted(kernel, switch, daemon.networks.held(), pulse)
    });
    start!(all, "firewall", [daemon, kernel, engine], |pulse| {
        let (settings, held) = (daemon.settings.clone(), daemon.networks.held());
        daemon.firewall.clone().keep((kernel, engine), settings, held, pulse)
    });
    start!(all, "link mtu", [daemon, kernel], |pulse| {
        let (links, control) = (daemon.links.clone(), daemon.control.clone());
        follow_link_mtu(daemon.settings.clone(), kernel, links, control, pulse)
    });
}

/// This host's interfaces on networks: those of `weft expose`, and the switch of `weft`, which may have an address by
/// hand.
async fn interfaces_on_networks(kernel: Kernel, shown: Arc<Vec<Attachment>>) -> Vec<Interfaces> {
    let is_other = |it: &&Attachment| it.made_by == EXPOSE && it.vni != Vni::WEFT.0;
    let other = |it: &Attachment| (Some(it.network.clone()), vec![exposed_on(Vni(it.vni))]);
    let weft = (None, vec![EXPOSED_INTERFACE.to_owned(), SWITCH.to_owned()]);
    let networks = shown.iter().filter(is_other).map(other);
    let networks: Vec<_> = std::iter::once(weft).chain(networks).collect();
    let mut found = Vec::with_capacity(networks.len());
    for (network, names) in networks {
        let mut devices = Vec::new();
        for name in names {
            // The kernel may not tell; it is asked again soon.
            devices.extend(kernel.device_addresses(&name).await.ok().flatten());
        }
        found.push(Interfaces { network, devices });
    }
    found
}

/// Repeats failed writes until they succeed.
async fn keep_saving(daemon: Arc<Daemon>, pulse: Pulse) {
    match daemon.store.keep_trying(&pulse).await {}
}

/// Notices when containers end, and plugs them in again when the switch was removed.
async fn watch_interfaces(
    kernel: Kernel,
    engine: KernelEngine,
    attachments: Arc<Attachments>,
    pulse: Pulse,
) {
    let mut look = pulse.is_again();
    loop {
        let Err(error) = follow_interfaces(&kernel, &engine, &attachments, &pulse, look).await;
        look = true;
        tracing::warn!(%error, again_ms = WATCH_RETRY_MS, "cannot watch interfaces");
        pulse.wait(tokio::time::sleep(Duration::from_millis(WATCH_RETRY_MS))).await;
    }
}

async fn follow_interfaces(
    kernel: &Kernel,
    engine: &KernelEngine,
    attachments: &Attachments,
    pulse: &Pulse,
    look: bool,
) -> Result<Infallible, weft_kernel::KernelError> {
    let mut watch = kernel.watch().await?;
    if look {
        // The switch or a container may have gone while nothing watched.
        engine.repair().await;
        attachments.plug_in_all().await;
    }
    loop {
        match pulse.wait(watch.next()).await? {
            LinkEvent::Removed { name } if name == SWITCH => {
                engine.repair().await;
                attachments.plug_in_all().await;
            }
            LinkEvent::Removed { name } if name == TAP => attachments.renew_tap().await,
            LinkEvent::Removed { name } => attachments.interface_removed(&name).await,
            _ => {}
        }
    }
}

/// Warns of routes of the host that contain the range or lie in it, as they come and go.
async fn watch_routes(daemon: Arc<Daemon>, kernel: Kernel, pulse: Pulse) {
    let (range, warnings) = (IpNet::V4(daemon.settings.range), &daemon.warnings);
    let warn = |route: HostRoute| {
        let HostRoute { destination, interface, .. } = route;
        let how = if range.contains(&destination) { "lies in" } else { "contains" };
        format!(
            "the host's route {destination} via {interface} {how} the range {range}: containers cannot reach the destinations of this route; remove it, or launch all hosts with another --ipalloc-range"
        )
    };
    loop {
        let look = async {
            let mut watch = kernel.watch_routes(0)?;
            loop {
                let routes = kernel.range_routes(range).await?;
                warnings.set("routes", routes.into_iter().map(warn).collect());
                pulse.wait(watch.changed()).await?;
                pulse.wait(tokio::time::sleep(Duration::from_millis(ROUTES_LOOK_MS))).await;
            }
        };
        let result: Result<Infallible, weft_kernel::KernelError> = look.await;
        let Err(error) = result;
        tracing::debug!(%error, "cannot watch routes");
        pulse.wait(tokio::time::sleep(Duration::from_millis(ROUTES_LOOK_MS))).await;
    }
}

/// Shortest pause between two checks of the host's routes, which may be a million, in milliseconds.
const ROUTES_LOOK_MS: u64 = 5_000;

//! Networks besides `weft`: users' requests, and the list of held networks for the service that makes their devices.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{oneshot, watch};
use weft_crypto::PeerId;
use weft_mesh::{
    EndpointInfo, IpamStatus, Mesh, NetworkDefinition, NetworkError, NetworkStatus, PeerStatus,
};
use weft_path::{Endpoint, Vni};

use super::engines::Engines;

/// A network besides `weft` that this host holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeldNetwork {
    pub(crate) definition: NetworkDefinition,
    /// Another one each time that the host comes to hold the network.
    pub(crate) serial: u64,
}

/// The held networks, by VNI.
pub(crate) type HeldList = Arc<Vec<HeldNetwork>>;

/// A request about networks besides `weft`.
pub(crate) enum NetworkRequest {
    /// Creates a network here.
    Create { definition: NetworkDefinition, reply: HeldReply },
    /// Holds a network that this host or another has, for a container.
    Join { name: String, reply: HeldReply },
    /// Ends this host's part in a network.
    Remove { name: String, reply: oneshot::Sender<Result<(), NetworkError>> },
    /// Asks for all networks that are known.
    List { reply: oneshot::Sender<NetworkList> },
    /// The devices of a held network stand: both engines carry it now.
    Stands { vni: Vni, serial: u64 },
    /// They are lost and cannot be made again for now.
    Fell { vni: Vni, serial: u64 },
}

/// Answers once the network is saved.
pub(crate) type HeldReply = oneshot::Sender<Result<HeldNetwork, NetworkError>>;

/// All known networks, `weft` first.
pub(crate) struct NetworkList {
    pub(crate) networks: Vec<(NetworkStatus, Option<IpamStatus>)>,
    /// Hosts with their names.
    pub(crate) peers: Vec<PeerStatus>,
}

/// The held networks as the service knows them, and the answers that wait for the disk.
pub(crate) struct Networks {
    local: PeerId,
    held: watch::Sender<HeldList>,
    /// Those that are on the disk.
    saved: HeldList,
    last_serial: u64,
    unsaved: Vec<(HeldReply, Vni)>,
}

impl Networks {
    /// Begins with those of the last run.
    pub(crate) fn new<'a>(
        local: PeerId,
        held: impl Iterator<Item = &'a NetworkDefinition>,
    ) -> Self {
        let (told, _) = watch::channel(Arc::default());
        let (saved, unsaved) = (HeldList::default(), Vec::new());
        let mut networks = Self { local, held: told, saved, last_serial: 0, unsaved };
        networks.follow(held);
        networks
    }

    /// What the service follows.
    pub(crate) fn held(&self) -> watch::Receiver<HeldList> {
        self.held.subscribe()
    }

    fn find(&self, vni: Vni) -> Option<HeldNetwork> {
        self.held.borrow().iter().find(|held| held.definition.vni == vni).cloned()
    }

    /// A network has ended. Should the host hold it again, it is another one for the service.
    pub(super) fn end(&self, vni: Vni) {
        let stays = |held: &&HeldNetwork| held.definition.vni != vni;
        self.held.send_modify(|all| *all = Arc::new(all.iter().filter(stays).cloned().collect()));
    }

    /// Tells the service of a change.
    fn follow<'a>(&mut self, held: impl Iterator<Item = &'a NetworkDefinition>) {
        let held: Vec<&NetworkDefinition> = held.collect();
        let known = Arc::clone(&self.held.borrow());
        if known.iter().map(|it| &it.definition).eq(held.iter().copied()) {
            return;
        }
        let all = held.into_iter().map(|definition| {
            let same = known.iter().find(|it| it.definition == *definition);
            same.cloned().unwrap_or_else(|| {
                self.last_serial += 1;
                HeldNetwork { definition: definition.clone(), serial: self.last_serial }
            })
        });
        let all = Arc::new(all.collect());
        self.held.send_replace(all);
    }
}

impl Networks {
    /// Answers a request of the API or of the service.
    pub(super) fn handle(
        &mut self,
        now: Instant,
        request: NetworkRequest,
        mesh: &mut Mesh,
        engines: &mut Engines,
    ) {
        match request {
            NetworkRequest::Create { definition, reply } => {
                let vni = definition.vni;
                match mesh.create_network(now, definition) {
                    Ok(()) => self.unsaved.push((reply, vni)),
                    Err(error) => _ = reply.send(Err(error)),
                }
            }
            NetworkRequest::Join { name, reply } => self.join(now, &name, reply, mesh),
            NetworkRequest::Remove { name, reply } => {
                let _ = reply.send(mesh.remove_network(now, &name));
            }
            NetworkRequest::List { reply } => {
                let status = |status: NetworkStatus| {
                    let ipam = mesh.ipam_on(status.definition.vni).filter(|_| status.here);
                    (status, ipam)
                };
                let networks = mesh.networks().into_iter().map(status).collect();
                let _ = reply.send(NetworkList { networks, peers: mesh.peers() });
            }
            NetworkRequest::Stands { vni, serial } => {
                if self.find(vni).is_some_and(|held| held.serial == serial) {
                    self.carry(vni, mesh, engines);
                }
            }
            NetworkRequest::Fell { vni, serial } => {
                if self.find(vni).is_some_and(|held| held.serial == serial) {
                    engines.end_network(vni);
                }
            }
        }
    }

    /// Holds a network for a container. One that is on the disk waits for no write: there may always be another.
    fn join(&mut self, now: Instant, name: &str, reply: HeldReply, mesh: &mut Mesh) {
        match mesh.join_network(now, name) {
            Ok(vni) => match self.find(vni).filter(|held| self.saved.contains(held)) {
                Some(held) => _ = reply.send(Ok(held)),
                None => self.unsaved.push((reply, vni)),
            },
            Err(error) => _ = reply.send(Err(error)),
        }
    }

    /// Tells the service which networks this host holds, and users that theirs is saved. The caller has polled all
    /// outputs of the mesh, unless its state is being saved.
    pub(super) fn settle(&mut self, mesh: &Mesh, is_saving: bool) {
        self.follow(mesh.held_networks());
        if is_saving {
            return;
        }
        let failure = mesh.save_failure();
        if failure.is_none() {
            self.saved = Arc::clone(&self.held.borrow());
        }
        for (reply, vni) in std::mem::take(&mut self.unsaved) {
            let result = match (failure, self.find(vni)) {
                (Some(why), _) => Err(NetworkError::NotSaved { why: why.to_owned() }),
                (None, Some(held)) => Ok(held),
                // It was removed again meanwhile.
                (None, None) => Err(NetworkError::Unknown { name: format!("of VNI {}", vni.0) }),
            };
            let _ = reply.send(result);
        }
    }

    /// Both engines have the network's devices: tells them everything about it.
    fn carry(&self, vni: Vni, mesh: &Mesh, engines: &mut Engines) {
        let remote = mesh.endpoints(vni).into_iter().filter(|(_, peer)| *peer != self.local);
        let endpoints = remote.map(|(info, peer)| (endpoint_of(&info), peer)).collect();
        engines.carry_network(vni, mesh.network_peers(vni), endpoints);
    }
}

/// An endpoint as the engines know it.
pub(super) fn endpoint_of(info: &EndpointInfo) -> Endpoint {
    let addresses = info.addresses.iter().map(ipnet::IpNet::addr).collect();
    Endpoint { mac: info.mac, addresses }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use weft_mesh::{Config, Founding};

    use super::*;

    fn held(networks: &Networks) -> Vec<(String, u64)> {
        let all = networks.held.borrow();
        all.iter().map(|it| (it.definition.name.clone(), it.serial)).collect()
    }

    #[test]
    fn a_network_that_ended_is_another_one_when_it_is_held_again() {
        let [shop, prod] = ["shop", "prod"].map(NetworkDefinition::new);
        let mut networks = Networks::new(PeerId::from_bytes([1; 32]), [&shop].into_iter());
        let news = networks.held();
        assert_eq!(held(&networks), [("shop".to_owned(), 1)]);
        networks.follow([&shop, &prod].into_iter());
        assert_eq!(held(&networks), [("shop".to_owned(), 1), ("prod".to_owned(), 2)]);
        assert!(news.has_changed().is_ok_and(|changed| changed));
        // It ends and begins again before anybody looks.
        networks.end(shop.vni);
        networks.follow([&shop, &prod].into_iter());
        assert_eq!(held(&networks), [("shop".to_owned(), 3), ("prod".to_owned(), 2)]);
        networks.follow(std::iter::empty());
        assert_eq!(held(&networks), []);
    }

    #[test]
    fn a_join_waits_until_its_network_is_saved_and_for_no_other_write() {
        let (now, local) = (Instant::now(), PeerId::from_bytes([1; 32]));
        let config = Config { founding: Founding::Found, ..Config::new(local, "one", 6_783) };
        let mut mesh = Mesh::new(now, config, None, [7; 32]).unwrap();
        let mut networks = Networks::new(local, mesh.held_networks());
        let join = |networks: &mut Networks, mesh: &mut Mesh| {
            let (reply, answer) = oneshot::channel();
            networks.join(now, "shop", reply, mesh);
            networks.settle(mesh, true);
            answer
        };
        let shop = NetworkDefinition::new("shop");
        mesh.create_network(now, shop.clone()).unwrap();
        networks.settle(&mesh, true);
        let mut first = join(&mut networks, &mut mesh);
        assert!(first.try_recv().is_err());
        networks.settle(&mesh, false);
        let saved = first.try_recv().unwrap().unwrap();
        // Something else is being written.
        assert_eq!(join(&mut networks, &mut mesh).try_recv().unwrap().unwrap(), saved);
        // The network ends and begins again before that is on the disk.
        mesh.remove_network(now, "shop").unwrap();
        networks.settle(&mesh, true);
        mesh.create_network(now, shop).unwrap();
        networks.settle(&mesh, true);
        let mut last = join(&mut networks, &mut mesh);
        assert!(last.try_recv().is_err());
        networks.settle(&mesh, false);
        assert_ne!(last.try_recv().unwrap().unwrap(), saved);
    }
}

//! The addresses that clients have, and what of them the host is set up for.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use tokio::task::JoinError;
use weft_kernel::{CLIENTS_DEVICE, ClientsChange, ClientsSpec, KernelError, LeftOut};
use weft_openvpn::messages::AuthFailure;

use super::{Serving, failed};
use crate::services::gateway::client::{Stage, Todo};
use crate::services::gateway::device::MTU;

/// What a refused client shows to its user.
const ROUTED_ELSEWHERE: &str = "The gateway's host has another route to this client's address";
/// How often all of the host's routes for clients are looked at, in seconds: another program may remove them.
const LOOK_S: u64 = 30;
/// The shortest time between two such looks, in seconds. Its cost grows with the number of clients; between two looks
/// only differences are carried out.
const LOOK_PAUSE_S: u64 = 1;
/// The pause after the host could not be set up, in seconds.
const RETRY_S: u64 = 1;
/// The pause after a change, in milliseconds: where many clients come at once, the next change is for more than one.
const GATHER_MS: u64 = 5;

/// Clients that waited for it, and whether the host is set up for them.
pub(super) type Routed = Result<Routing, JoinError>;
/// Clients, and what another program has routed elsewhere.
pub(super) type Routing = (Vec<u32>, Result<LeftOut, KernelError>);

/// Whether the rules are looked at as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WithRules(bool);

/// The addresses of all clients, and what the host is not set up for yet.
pub(super) struct Routes {
    /// By how many clients have each: for a moment a client's next session has those of the one before.
    held: HashMap<IpAddr, usize>,
    new: BTreeSet<IpAddr>,
    gone: BTreeSet<IpAddr>,
    /// Clients that are let in once the host is set up for them.
    waiting: Vec<u32>,
    /// When all is looked at, also if no client comes or goes.
    look_at: Instant,
    /// From when on all is looked at with the next change.
    looks_from: Instant,
    /// When the rules are looked at, too.
    rules_at: Instant,
    /// Nothing is tried before.
    paused_until: Instant,
}

impl Routes {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            held: HashMap::new(),
            new: BTreeSet::new(),
            gone: BTreeSet::new(),
            waiting: Vec::new(),
            look_at: now,
            looks_from: now,
            rules_at: now,
            paused_until: now,
        }
    }

    /// A client has these addresses, and is let in once the host is set up for them.
    pub(super) fn add(&mut self, number: u32, addresses: &[IpAddr]) {
        self.waiting.push(number);
        for address in addresses {
            let holders = self.held.entry(*address).or_default();
            *holders += 1;
            if *holders == 1 && !self.gone.remove(address) {
                self.new.insert(*address);
            }
        }
    }

    /// A client has them no more.
    pub(super) fn remove(&mut self, addresses: &[IpAddr]) {
        for address in addresses {
            let Some(holders) = self.held.get_mut(address) else { continue };
            *holders -= 1;
            if *holders == 0 {
                self.held.remove(address);
                if !self.new.remove(address) {
                    self.gone.insert(*address);
                }
            }
        }
    }

    /// When there is something to do, if no client comes or goes, and nobody is at it.
    fn next_at(&self) -> Instant {
        if self.is_settled() { self.look_at.max(self.paused_until) } else { self.paused_until }
    }

    fn is_settled(&self) -> bool {
        self.waiting.is_empty() && self.new.is_empty() && self.gone.is_empty()
    }

    fn is_due(&self, now: Instant) -> bool {
        now >= self.next_at()
    }

    /// The host is set up for all clients that there were.
    fn finish(&mut self, now: Instant) {
        self.paused_until = now + Duration::from_millis(GATHER_MS);
    }

    /// Whether all is to be looked at rather than the differences, and the rules with it; then that is noted as done.
    fn begin_look(&mut self, now: Instant) -> Option<WithRules> {
        if now < self.looks_from && now < self.look_at {
            // A change is followed by a look all the same.
            self.look_at = self.look_at.min(self.looks_from);
            return None;
        }
        self.look_at = now + Duration::from_secs(LOOK_S);
        self.looks_from = now + Duration::from_secs(LOOK_PAUSE_S);
        let with_rules = now >= self.rules_at;
        if with_rules {
            self.rules_at = self.look_at;
        }
        Some(WithRules(with_rules))
    }

    /// All is looked at with the next change, as the difference does not tell it.
    pub(super) fn look(&mut self, now: Instant) {
        self.looks_from = self.looks_from.min(now);
    }

    /// The host could not be set up: all is looked at after a pause.
    fn fail(&mut self, now: Instant, waiting: Vec<u32>) {
        self.waiting.extend(waiting);
        self.paused_until = now + Duration::from_secs(RETRY_S);
        (self.look_at, self.looks_from, self.rules_at) = (now, now, now);
    }
}

impl Serving {
    /// When the host is to be set up or looked at next; `None` while somebody is at it.
    pub(super) fn routes_at(&self) -> Option<Instant> {
        self.routing.is_empty().then(|| self.routes.next_at())
    }

    /// Sets the host up for the clients that there are, if it is not, and nobody is at it.
    pub(super) fn route(&mut self) {
        let now = Instant::now();
        if !self.routing.is_empty() || !self.routes.is_due(now) {
            return;
        }
        let routes = &mut self.routes;
        let waiting = std::mem::take(&mut routes.waiting);
        let (new, gone) = (std::mem::take(&mut routes.new), std::mem::take(&mut routes.gone));
        let (device, exposed) = (CLIENTS_DEVICE.to_owned(), self.begun.exposed.clone());
        let gateway = Arc::clone(&self.gateway);
        let source = self.begun.inside.own_ipv4();
        if let Some(WithRules(with_rules)) = routes.begin_look(now) {
            let addresses = routes.held.keys().copied().collect();
            let (mtu, networks) = (MTU.into(), self.networks_behind());
            self.begun.channel.set_routes(&networks);
            let spec = ClientsSpec { device, mtu, exposed, addresses, networks, source };
            let ways = with_rules.then(|| self.begun.ways.clone());
            self.routing.spawn(async move { (waiting, gateway.route(&spec, ways.as_ref()).await) });
        } else {
            let change = ClientsChange { device, exposed, new, gone, source };
            let kernel = gateway.kernel.clone();
            self.routing.spawn(async move { (waiting, kernel.change_clients(&change).await) });
        }
    }

    /// Has all routes looked at, if there are networks behind a client that comes or goes.
    pub(super) fn look_if_behind(&mut self, name: &str) {
        let import = self.gateway.imported_now();
        if import.is_some_and(|import| !import.networks(name).is_empty()) {
            self.routes.look(Instant::now());
        }
    }

    /// The networks behind the clients that there are, each with its client's address. Of several sessions of a name,
    /// the newest has them.
    fn networks_behind(&self) -> BTreeMap<IpNet, IpAddr> {
        let mut behind = BTreeMap::new();
        let import = self.gateway.imported_now().filter(|import| import.has_networks());
        let Some(import) = import else { return behind };
        for (number, client) in &self.clients {
            let (Stage::Routing(known) | Stage::Peer { known, .. }) = &client.stage else {
                continue;
            };
            if self.newest(&known.login.name) != Some(*number) {
                continue;
            }
            for network in import.networks(&known.login.name) {
                let is_its = |address: &&IpAddr| address.is_ipv4() == network.addr().is_ipv4();
                if let Some(address) = known.addresses.iter().find(is_its) {
                    behind.insert(network, *address);
                }
            }
        }
        behind
    }

    pub(super) fn handle_routed(&mut self, routed: Routed) -> Result<(), String> {
        let (waiting, result) = routed.map_err(|error| failed(&error))?;
        match result {
            Ok(LeftOut { addresses, networks }) => {
                for network in networks {
                    tracing::warn!(%network, "not routed to its client: this host has another route there");
                }
                for address in &addresses {
                    tracing::warn!(%address, "not routed to its client: this host has another route there");
                }
                for number in waiting {
                    match self.has_one_of(number, &addresses) {
                        true => self.refuse_unrouted(number),
                        false => self.let_in(number),
                    }
                }
                self.routes.finish(Instant::now());
                Ok(())
            }
            Err(error @ KernelError::LinkMissing { .. }) => Err(error.to_string()),
            Err(error) => {
                tracing::warn!(%error, "cannot set this host up for OpenVPN clients; trying again");
                self.routes.fail(Instant::now(), waiting);
                Ok(())
            }
        }
    }

    /// Whether a client is to have one of these addresses.
    fn has_one_of(&self, number: u32, addresses: &BTreeSet<IpAddr>) -> bool {
        let known = self.clients.get(&number).and_then(|client| client.known());
        known.is_some_and(|known| known.addresses.iter().any(|it| addresses.contains(it)))
    }

    /// Refuses a client whose packets would go elsewhere.
    fn refuse_unrouted(&mut self, number: u32) {
        self.count("routed_elsewhere");
        self.leave(number);
        self.ask(number, Todo::Deny(AuthFailure::Text(ROUTED_ELSEWHERE.into())));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn addresses(last: u8) -> Vec<IpAddr> {
        vec![IpAddr::from([10, 32, 0, last])]
    }

    #[test]
    fn an_address_that_passes_from_one_session_to_the_next_is_no_change() {
        let now = Instant::now();
        let mut routes = Routes::new(now);
        routes.add(1, &addresses(1));
        assert_eq!(routes.new.len(), 1);
        routes.new.clear();
        // The new session comes before the old one goes.
        routes.add(2, &addresses(1));
        routes.remove(&addresses(1));
        assert!(routes.new.is_empty() && routes.gone.is_empty());
        // The old one goes first.
        routes.remove(&addresses(1));
        assert_eq!(routes.gone.len(), 1);
        routes.add(3, &addresses(1));
        assert!(routes.new.is_empty() && routes.gone.is_empty());
        // One that comes and goes at once.
        routes.add(4, &addresses(2));
        routes.remove(&addresses(2));
        assert!(routes.new.is_empty() && routes.gone.is_empty());
        assert_eq!(routes.held.len(), 1);
    }

    #[test]
    fn many_clients_at_once_cost_one_look_a_second_and_rules_one_in_thirty() {
        let now = Instant::now();
        let at = |seconds: u64| now + Duration::from_secs(seconds);
        let mut routes = Routes::new(now);
        assert!(routes.is_due(now));
        assert_eq!(routes.begin_look(now), Some(WithRules(true)));
        assert!(!routes.is_due(now), "nothing has changed");
        routes.add(1, &addresses(1));
        assert!(routes.is_due(now));
        assert_eq!(routes.begin_look(now), None, "the difference alone");
        routes.waiting.clear();
        routes.new.clear();
        // What another program did is mended a second after the change at the latest.
        assert_eq!(routes.next_at(), at(LOOK_PAUSE_S));
        assert!(routes.is_due(at(LOOK_PAUSE_S)));
        assert_eq!(routes.begin_look(at(LOOK_PAUSE_S)), Some(WithRules(false)));
        assert_eq!(routes.next_at(), at(LOOK_PAUSE_S + LOOK_S));
        assert!(!routes.is_due(at(LOOK_S)));
        assert_eq!(routes.begin_look(at(LOOK_S)), Some(WithRules(true)));
    }

    #[test]
    fn clients_that_come_right_after_a_change_are_gathered() {
        let now = Instant::now();
        let mut routes = Routes::new(now);
        assert!(routes.begin_look(now).is_some());
        routes.finish(now);
        routes.add(1, &addresses(1));
        routes.add(2, &addresses(2));
        let pause = Duration::from_millis(GATHER_MS);
        assert!(!routes.is_due(now));
        assert_eq!(routes.next_at(), now + pause);
        assert!(routes.is_due(now + pause));
    }

    #[test]
    fn a_failure_is_followed_by_a_look_after_a_pause() {
        let now = Instant::now();
        let mut routes = Routes::new(now);
        assert!(routes.begin_look(now).is_some());
        routes.fail(now, vec![1, 2]);
        let pause = Duration::from_secs(RETRY_S);
        assert!(!routes.is_due(now) && routes.is_due(now + pause));
        assert_eq!(routes.next_at(), now + pause);
        assert_eq!(routes.begin_look(now + pause), Some(WithRules(true)));
        assert_eq!(routes.waiting, [1, 2]);
    }
}

//! What a session tells: who a client is, its keys, its end.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use weft_openvpn::messages::{AuthFailure, Message};
use weft_openvpn::session::{EndReason, Event, Session};

use super::Serving;
use super::login::REVOKED;
use crate::services::gateway::client::{Stage, Todo};
use crate::services::gateway::device::KeyChange;
use crate::services::gateway::peers::Kept;
use crate::services::gateway::{Gateway, owner_of};
use crate::services::networks::OnNetwork;

/// What a refused client shows to its user.
const NO_ADDRESS: &str = "The gateway has no address for this client now";
/// The time in which addresses are gathered that are announced together, in milliseconds.
const ANNOUNCE_GATHER_MS: u64 = 10;

impl Serving {
    /// Does what a session tells; returns a change of its client's keys that is to be made.
    pub(super) fn handle_session_event(
        &mut self,
        number: u32,
        session: &mut Session,
        event: Event,
    ) -> Option<KeyChange> {
        match event {
            Event::Authenticate(request) => self.authenticate(number, *request),
            Event::InstallKey(slot, keys) => return Some(KeyChange::Install(slot, keys)),
            Event::SwapKeys => return Some(KeyChange::Swap),
            Event::RemoveSecondaryKey => return Some(KeyChange::RemoveSecondary),
            Event::Connected => self.connected(number),
            Event::Message(Message::ChallengeResponse(code)) => self.handle_answer(number, code),
            // Nothing that a client says beyond that concerns the gateway.
            Event::Pushed(_) | Event::Message(_) => {}
            Event::Ended(reason) => {
                self.told(number, &reason.to_string());
                if matches!(reason, EndReason::Tls(_)) {
                    self.count("handshake_failed");
                }
                if !matches!(reason, EndReason::Closed | EndReason::PeerExit) {
                    tracing::debug!(%reason, from = %session.address(), "a session has ended");
                }
                self.leave(number);
            }
        }
        None
    }

    /// Whether there is no room for a client of this name.
    pub(super) fn is_full(&self, name: &str) -> bool {
        let Some(import) = self.gateway.imported_now() else { return false };
        let others = match import.allows_duplicates() {
            true => self.names.values().map(Vec::len).sum(),
            false => self.names.len() - usize::from(self.names.contains_key(name)),
        };
        others >= import.clients_max()
    }

    /// Which of the sessions of its name a new one is: the first, unless a name may have several.
    pub(super) fn free_instance(&self, number: u32, name: &str) -> u32 {
        if !self.allows_duplicates() {
            return 1;
        }
        let others = self.named(name).into_iter().filter(|other| *other != number);
        let taken: BTreeSet<u32> = others
            .filter_map(|other| self.clients.get(&other)?.known().map(|known| known.instance))
            .collect();
        (1..).find(|instance| !taken.contains(instance)).unwrap_or(1)
    }

    /// Whether a name may be connected several times.
    pub(super) fn allows_duplicates(&self) -> bool {
        self.gateway.imported_now().is_some_and(|import| import.allows_duplicates())
    }

    /// Finds the addresses of a name, which it keeps.
    pub(super) fn find_addresses(&mut self, number: u32, name: String, instance: u32) {
        let gateway = Arc::clone(&self.gateway);
        let network = self.begun.network.clone();
        let has_ipv6 = self.begun.has_ipv6;
        self.given.spawn(async move {
            let given = gateway.addresses_of(&network, (&name, instance), has_ipv6).await;
            let fits = |address: &IpAddr| has_ipv6 || address.is_ipv4();
            (number, given.map(|given| given.into_iter().filter(fits).collect()))
        });
    }

    pub(super) fn handle_addresses(&mut self, number: u32, given: Result<Vec<IpAddr>, String>) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let Stage::Asked(mut known) = std::mem::replace(&mut client.stage, Stage::Over) else {
            return;
        };
        let name = &known.login.name;
        let holder = known.certificate.as_ref();
        let is_revoked = holder.is_some_and(|holder| self.gateway.is_revoked(holder));
        let refusal = match given {
            Ok(_) if is_revoked => Some(REVOKED),
            Ok(addresses) if addresses.iter().any(IpAddr::is_ipv4) => {
                known.addresses = addresses;
                None
            }
            Ok(_) => Some(NO_ADDRESS),
            Err(reason) => {
                tracing::warn!(client = name, reason, "no address for an OpenVPN client");
                Some(NO_ADDRESS)
            }
        };
        match refusal {
            None => {
                self.routes.add(number, &known.addresses);
                let name = known.login.name.clone();
                client.stage = Stage::Routing(known);
                self.look_if_behind(&name);
            }
            Some(why) => {
                self.unname(number, &known.login.name);
                self.ask(number, Todo::Deny(AuthFailure::Text(why.into())));
            }
        }
    }

    fn connected(&mut self, number: u32) {
        self.begun.gate.handle_connected();
        self.begun.channel.take_resets();
        let Some(client) = self.clients.get_mut(&number) else { return };
        let from = client.address;
        let Stage::Peer { known, is_connected } = &mut client.stage else { return };
        *is_connected = true;
        let (name, addresses) = (&known.login.name, known.addresses.clone());
        tracing::info!(client = name, %from, ?addresses, "an OpenVPN client is connected");
        self.gateway.name(number, name, &self.begun.network.name, &addresses);
        self.tell_established(number);
        self.announce(&addresses);
    }

    /// Announces a client's addresses, with those of others that are let in at about the same time: other hosts'
    /// containers may know them from the gateway that the client had before.
    fn announce(&self, addresses: &[IpAddr]) {
        let unannounced = Arc::clone(&self.unannounced);
        let is_first = {
            let mut unannounced = unannounced.lock().unwrap_or_else(PoisonError::into_inner);
            unannounced.extend(addresses);
            unannounced.len() == addresses.len()
        };
        if !is_first {
            return;
        }
        let (kernel, exposed) = (self.gateway.kernel.clone(), self.begun.exposed.clone());
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(ANNOUNCE_GATHER_MS)).await;
            let all = {
                let mut all = unannounced.lock().unwrap_or_else(PoisonError::into_inner);
                std::mem::take(&mut *all)
            };
            if let Err(error) = kernel.announce_clients(&exposed, &all).await {
                tracing::debug!(%error, "cannot announce addresses of clients");
            }
        });
    }
}

impl Gateway {
    /// The addresses of one of the sessions of a name.
    async fn addresses_of(
        &self,
        network: &OnNetwork,
        (name, instance): (&str, u32),
        has_ipv6: bool,
    ) -> Result<Vec<IpAddr>, String> {
        let Some(import) = self.imported_now() else {
            return self.client_addresses(network, name, None).await;
        };
        if !import.gives_address(name) {
            return Err("it has no file with an address, and there is no pool".into());
        }
        let (fixed, last) = import.kept(name);
        if !import.allows_duplicates() {
            let kept = Kept { fixed, last, wants_ipv6: has_ipv6 };
            return self.client_addresses(network, name, Some(kept)).await;
        }
        let mut owner = owner_of(&network.name, name);
        if instance > 1 {
            owner.push_str(&format!("#{instance}"));
        }
        // One session has what is kept for the name, and the home has claimed that.
        let is_first = instance == 1 && !import.is_replica();
        let kept = if is_first { (fixed, last) } else { (None, None) };
        let of = (owner.as_str(), network.vni);
        let given = self.imported_addresses(of, kept, has_ipv6).await?;
        Ok(given.iter().map(ipnet::IpNet::addr).collect())
    }
}

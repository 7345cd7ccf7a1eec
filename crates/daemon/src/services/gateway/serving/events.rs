//! What a session tells: who a client is, its keys, its end.

use std::net::IpAddr;
use std::sync::Arc;

use weft_openvpn::messages::{AuthFailure, Message};
use weft_openvpn::session::{EndReason, Event, Session};

use super::Serving;
use super::login::REVOKED;
use crate::services::gateway::client::{Stage, Todo};
use crate::services::gateway::device::KeyChange;

/// What a refused client shows to its user.
const NO_ADDRESS: &str = "The gateway has no address for this client now";

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
                if !matches!(reason, EndReason::Closed | EndReason::PeerExit) {
                    tracing::debug!(%reason, from = %session.address(), "a session has ended");
                }
                self.leave(number);
            }
        }
        None
    }

    /// Finds the addresses of a name, which it keeps.
    pub(super) fn find_addresses(&mut self, number: u32, name: String) {
        let gateway = Arc::clone(&self.gateway);
        let network = self.begun.network.clone();
        let has_ipv6 = self.begun.has_ipv6;
        self.given.spawn(async move {
            let given = gateway.client_addresses(&network, &name).await.map(|given| {
                given.into_iter().filter(|address| has_ipv6 || address.is_ipv4()).collect()
            });
            (number, given)
        });
    }

    pub(super) fn handle_addresses(&mut self, number: u32, given: Result<Vec<IpAddr>, String>) {
        let Some(client) = self.clients.get_mut(&number) else { return };
        let Stage::Asked(mut known) = std::mem::replace(&mut client.stage, Stage::Over) else {
            return;
        };
        let name = &known.login.name;
        let holder = known.certificate.as_ref();
        let is_revoked = holder.is_some_and(|holder| self.gateway.is_revoked(&holder.serial));
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
                client.stage = Stage::Routing(known);
            }
            Some(why) => {
                self.unname(number, &known.login.name);
                self.ask(number, Todo::Deny(AuthFailure::Text(why.into())));
            }
        }
    }

    fn connected(&mut self, number: u32) {
        self.begun.gate.handle_connected();
        let Some(client) = self.clients.get_mut(&number) else { return };
        let from = client.address;
        let Stage::Peer { known, is_connected } = &mut client.stage else { return };
        *is_connected = true;
        let (name, addresses) = (&known.login.name, known.addresses.clone());
        tracing::info!(client = name, %from, ?addresses, "an OpenVPN client is connected");
        self.gateway.name(number, name, &self.begun.network.name, &addresses);
        let (kernel, exposed) = (self.gateway.kernel.clone(), self.begun.exposed.clone());
        tokio::spawn(async move {
            // Other hosts' containers may know the address from the gateway that the client had before.
            if let Err(error) = kernel.announce_clients(&exposed, &addresses).await {
                tracing::debug!(%error, "cannot announce a client's addresses");
            }
        });
    }
}

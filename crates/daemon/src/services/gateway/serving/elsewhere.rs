//! What other gateways tell this one about its clients.

use weft_openvpn::messages::Message;

use super::Serving;
use crate::services::gateway::client::{Client, Known, Todo};

impl Serving {
    /// Another gateway has let this client in. It is there: nobody is left here who would hear a farewell.
    pub(super) fn end_elsewhere(&mut self, name: &str) {
        // It may have come back since that was told.
        if self.gateway.peers.is_here(name) {
            return;
        }
        for number in self.of_name(name, Client::is_peer) {
            self.told(number, "it has connected to another gateway");
            self.forget(number);
        }
    }

    /// Another gateway's word about a client's addresses holds.
    pub(super) fn readdress(&mut self, network: String, name: String) {
        if network != self.begun.network.name {
            return;
        }
        let key = (network, name);
        let addresses = self.gateway.peers.addresses(&key).unwrap_or_default();
        let is_other = |client: &Client| {
            // Those who are revoked are told so.
            let known = client.known().filter(|known| !self.is_revoked(known));
            let mut own = known.into_iter().flat_map(|known| &known.addresses);
            own.any(|address| !addresses.contains(address))
        };
        for number in self.of_name(&key.1, is_other) {
            self.told(number, "it gets other addresses");
            self.leave(number);
            let text = "other addresses".to_owned();
            let restart = Message::Restart { preserve: true, next_remote: false, text };
            self.ask(number, Todo::Close(restart));
        }
    }

    /// The authority's home has told who is revoked.
    pub(super) fn end_revoked(&mut self) {
        let is_revoked = |client: &Client| client.known().is_some_and(|it| self.is_revoked(it));
        let revoked = self.clients.iter().filter(|(_, client)| is_revoked(client));
        for number in revoked.map(|(number, _)| *number).collect::<Vec<_>>() {
            self.told(number, "its certificate was revoked");
            // At once, also where a thread has the session.
            self.leave(number);
            self.ask(number, Todo::Close(Message::Halt("certificate revoked".into())));
        }
    }

    fn is_revoked(&self, known: &Known) -> bool {
        let holder = known.certificate.as_ref();
        holder.is_some_and(|holder| self.gateway.is_revoked(holder))
    }

    /// The clients of a name of which this holds.
    fn of_name(&self, name: &str, holds: impl Fn(&Client) -> bool) -> Vec<u32> {
        let its = self.named(name).into_iter();
        its.filter(|number| self.clients.get(number).is_some_and(&holds)).collect()
    }
}

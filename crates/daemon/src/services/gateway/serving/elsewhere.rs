//! What other gateways tell this one about its clients.

use weft_openvpn::messages::Message;

use super::Serving;
use crate::services::gateway::client::{Client, Known, Todo};

impl Serving {
    /// Another gateway has let this client in. It is there: nobody is left here who would hear a farewell.
    pub(super) fn end_elsewhere(&mut self, session: &str) {
        // It may have come back since that was told.
        if self.gateway.peers.is_here(session) {
            return;
        }
        let Some(name) = self.name_of(session) else { return };
        for number in self.of_name(&name, Client::is_peer) {
            self.told(number, "it has connected to another gateway");
            self.forget(number);
        }
    }

    /// A client's session, as all gateways know it. Elsewhere in the mesh, a client of another authority may have the same
    /// name as one of a configuration that was taken over: the network tells them apart.
    pub(super) fn session_of(&self, name: &str) -> String {
        match self.gateway.imported_now() {
            Some(_) => format!("{}/{name}", self.begun.network.name),
            None => name.to_owned(),
        }
    }

    /// The name of the client of a session; `None`: it is of none of this gateway's clients.
    fn name_of(&self, session: &str) -> Option<String> {
        let name = match self.gateway.imported_now() {
            Some(_) => session.strip_prefix(&self.begun.network.name)?.strip_prefix('/')?,
            None => session,
        };
        Some(name.to_owned())
    }

    /// Another gateway's word about a client's addresses holds.
    pub(super) fn readdress(&mut self, network: String, name: String) {
        if network != self.begun.network.name {
            return;
        }
        let key = (network, name);
        let addresses = self.gateway.peers.addresses(&key).unwrap_or_default();
        let is_other = |client: &Client| {
            // Those who are no longer let in are told so.
            let known = client.known().filter(|known| self.last_word(known).is_none());
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

    /// The authority's home has told who is revoked, and which users there are.
    pub(super) fn end_unwanted(&mut self) {
        let last_word = |client: &Client| self.last_word(client.known()?);
        let all = self.clients.iter();
        let unwanted = all.filter_map(|(number, client)| Some((*number, last_word(client)?)));
        for (number, farewell) in unwanted.collect::<Vec<_>>() {
            self.told(number, "its certificate was revoked, or its user was removed or changed");
            // At once, also where a thread has the session.
            self.leave(number);
            self.ask(number, Todo::Close(farewell));
        }
    }

    /// What a client is told that is no longer let in; `None`: it is.
    fn last_word(&self, known: &Known) -> Option<Message> {
        let holder = known.certificate.as_ref();
        if holder.is_some_and(|holder| self.gateway.is_revoked(holder)) {
            return Some(Message::Halt("certificate revoked".into()));
        }
        self.gateway.logins.standing(&known.login).last_word()
    }

    /// The clients of a name of which this holds.
    fn of_name(&self, name: &str, holds: impl Fn(&Client) -> bool) -> Vec<u32> {
        let its = self.named(name).into_iter();
        its.filter(|number| self.clients.get(number).is_some_and(&holds)).collect()
    }
}

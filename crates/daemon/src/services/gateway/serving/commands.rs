//! Requests of the API to the gateway that serves.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::oneshot;
use weft_api::VpnClient;
use weft_openvpn::messages::Message;

use super::Serving;
use super::login::Whom;
use crate::services::gateway::client::{Client, Known, Todo};
use crate::services::gateway::named::dns_name;
use crate::services::gateway::roster::Roster;
use crate::timestamp;

/// Why sessions have ended.
const UNFIT: &str = "its certificate was revoked, or its user was removed or changed";
const BY_HAND: &str = "the administrator has ended its session";

/// A request of the API.
pub(in super::super) enum Command {
    /// Lists the connected clients.
    List { reply: oneshot::Sender<Vec<VpnClient>> },
    /// Ends sessions with a last word. Replies whether one of them was connected.
    End { whom: Whom, farewell: Message, reply: oneshot::Sender<bool> },
    /// Ends the sessions of a client that another gateway has let in.
    Elsewhere { name: String },
    /// Has a client connect again if it has other addresses than it is to have.
    Readdress { network: String, name: String },
    /// Ends the sessions of all who are no longer let in.
    Judge,
    /// Ends the sessions of revoked certificates. Replies how many there were.
    EndRevoked { reply: oneshot::Sender<usize> },
    /// Lists the connected clients for other programs.
    Roster { reply: oneshot::Sender<Roster> },
    /// Ends sessions with a last word, for an administrator. Replies how many there were.
    Kill { whom: Whom, farewell: Message, reply: oneshot::Sender<usize> },
    /// Tells what it has to do now.
    Look { reply: oneshot::Sender<Look> },
}

/// What a gateway that serves has to do.
pub(in super::super) struct Look {
    /// Packets dropped, by reason.
    pub(in super::super) drops: BTreeMap<String, u64>,
    /// Clients that are connected.
    pub(in super::super) connected: usize,
    pub(in super::super) sessions: usize,
}

impl Serving {
    pub(super) fn handle_command(&mut self, command: Command) {
        match command {
            Command::List { reply } => self.list(reply),
            Command::End { whom, farewell, reply } => {
                let its = |number, client: &Client, known: &Known| whom.is(number, client, known);
                let ended = self.end(its, UNFIT, &farewell);
                let _ = reply.send(ended.contains(&true));
            }
            Command::EndRevoked { reply } => {
                let gateway = Arc::clone(&self.gateway);
                let is_revoked = |_, _: &Client, known: &Known| {
                    let certificate = known.certificate.as_ref();
                    certificate.is_some_and(|holder| gateway.is_revoked(holder))
                };
                let farewell = Message::Halt("certificate revoked".into());
                let ended = self.end(is_revoked, UNFIT, &farewell);
                let _ = reply.send(ended.len());
            }
            Command::Elsewhere { name } => self.end_elsewhere(&name),
            Command::Readdress { network, name } => self.readdress(network, name),
            Command::Judge => self.end_unwanted(),
            Command::Roster { reply } => self.roster(reply),
            Command::Kill { whom, farewell, reply } => {
                let its = |number, client: &Client, known: &Known| whom.is(number, client, known);
                let _ = reply.send(self.end(its, BY_HAND, &farewell).len());
            }
            Command::Look { reply } => {
                let own = self.drops.iter().map(|(reason, count)| (*reason, *count));
                let of_watchers = [("notices_lost", self.gateway.journal.lost())];
                let own = own.chain(of_watchers);
                let all = own.chain(self.begun.channel.drops()).filter(|(_, count)| *count > 0);
                let drops = all.map(|(reason, count)| (reason.to_owned(), count)).collect();
                let connected = self.clients.values().filter(|it| it.is_connected()).count();
                let _ = reply.send(Look { drops, connected, sessions: self.clients.len() });
            }
        }
    }

    /// Ends sessions with a last word. Returns for each whether it was connected.
    fn end(
        &mut self,
        is_it: impl Fn(u32, &Client, &Known) -> bool,
        why: &str,
        farewell: &Message,
    ) -> Vec<bool> {
        let its = self.clients.iter().filter(|(number, client)| {
            client.known().is_some_and(|known| is_it(**number, client, known))
        });
        let its: Vec<(u32, bool)> = its.map(|(number, it)| (*number, it.is_connected())).collect();
        for (number, _) in &its {
            self.told(*number, why);
            // At once, also where a thread has the session.
            self.leave(*number);
            self.ask(*number, Todo::Close(farewell.clone()));
        }
        its.into_iter().map(|(_, was_connected)| was_connected).collect()
    }

    /// Lists the connected clients, once the device has told its counters.
    pub(super) fn list(&self, reply: oneshot::Sender<Vec<VpnClient>>) {
        let connected = self.clients.iter().filter(|(_, client)| client.is_connected());
        let engine = self.begun.channel.engine();
        let line = |(number, client): (&u32, &Client)| {
            let known = client.known()?;
            let shown = VpnClient {
                name: known.login.name.clone(),
                user: known.login.user.clone(),
                dns_name: dns_name(&known.login.name),
                addresses: known.addresses.clone(),
                real_address: client.address,
                protocol: client.transport.protocol(),
                cipher: known.cipher.to_owned(),
                engine: engine.to_owned(),
                bytes_in: 0,
                bytes_out: 0,
                since: timestamp::format(known.since),
                last_handshake: timestamp::format(known.last_handshake),
                version: known.info.version().map(str::to_owned),
                platform: known.info.platform().map(str::to_owned),
            };
            Some((*number, shown))
        };
        let mut shown: BTreeMap<u32, VpnClient> = connected.filter_map(line).collect();
        let channel = Arc::clone(&self.begun.channel);
        tokio::spawn(async move {
            for peer in channel.peers().await {
                if let Some(line) = shown.get_mut(&peer.id) {
                    (line.bytes_in, line.bytes_out) = (peer.vpn.rx_bytes, peer.vpn.tx_bytes);
                }
            }
            let mut list: Vec<VpnClient> = shown.into_values().collect();
            list.sort_by(|one, other| one.name.cmp(&other.name));
            let _ = reply.send(list);
        });
    }
}

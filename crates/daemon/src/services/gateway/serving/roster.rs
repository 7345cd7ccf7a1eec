//! What programs that watch the gateway ask of it: who is connected, and to end sessions.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use tokio::sync::oneshot;
use weft_openvpn::device::Traffic;

use super::{Command, Serving};
use crate::services::gateway::Gateway;
use crate::services::gateway::client::Client;
use crate::services::gateway::journal::{Established, Weight};
use crate::services::gateway::roster::{Entry, Roster};

impl Gateway {
    /// The connected clients; `None`: the gateway does not serve.
    pub(in super::super) async fn roster(&self) -> Option<Roster> {
        self.ask(|reply| Command::Roster { reply }).await
    }
}

impl Serving {
    /// Lists the connected clients, once the device has told its counters.
    pub(super) fn roster(&self, reply: oneshot::Sender<Roster>) {
        let import = self.gateway.imported_now();
        let networks = |number: u32, name: &str| match &import {
            Some(import) if self.newest(name) == Some(number) => import.networks(name),
            _ => Vec::new(),
        };
        let entry = |(number, client): (&u32, &Client)| {
            let known = client.known().filter(|_| client.is_connected())?;
            let entry = Entry {
                number: *number,
                name: known.login.name.clone(),
                user: known.login.user.clone(),
                addresses: known.addresses.clone(),
                networks: networks(*number, &known.login.name),
                real_address: client.address,
                link: Traffic::default(),
                since: known.since,
                cipher: known.cipher,
            };
            Some((*number, entry))
        };
        let mut entries: BTreeMap<u32, Entry> = self.clients.iter().filter_map(entry).collect();
        let channel = Arc::clone(&self.begun.channel);
        tokio::spawn(async move {
            let (peers, total) = channel.peers_and_total().await;
            for peer in peers {
                if let Some(entry) = entries.get_mut(&peer.id) {
                    entry.link = peer.link;
                }
            }
            let (at, is_kernel) = (SystemTime::now(), channel.is_kernel());
            let entries = entries.into_values().collect();
            let _ = reply.send(Roster { at, is_kernel, entries, total });
        });
    }

    /// Tells those who watch that a client is connected.
    pub(super) fn tell_established(&self, number: u32) {
        let Some(client) = self.clients.get(&number) else { return };
        let Some(known) = client.known() else { return };
        let (name, journal) = (&known.login.name, &self.gateway.journal);
        let addresses: Vec<String> = known.addresses.iter().map(IpAddr::to_string).collect();
        let text = format!("is connected as {}", addresses.join(", "));
        journal.line_of(Weight::Info, name, client.address, &text);
        journal.established(Established {
            number,
            name: name.clone(),
            user: known.login.user.clone(),
            real_address: client.address,
            addresses: known.addresses.clone(),
            version: known.info.version().map(str::to_owned),
            platform: known.info.platform().map(str::to_owned),
            at: SystemTime::now(),
        });
    }
}

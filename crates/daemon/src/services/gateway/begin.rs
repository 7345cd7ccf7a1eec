//! All that is made before the first packet.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::mpsc;
use weft_api::{ApiError, Attachment, ClientName, ErrorKind, ExposeRequest, LoginSettings};
use weft_crypto::DataCipher;
use weft_engine::dco::Event;
use weft_openvpn::gate::{Gate, GateConfig};
use weft_openvpn::key_method::LinkOptions;
use weft_openvpn::session::ServerOptions;

use super::certificates::{no_authority, refusal};
use super::device::{DataChannel, MTU};
use super::login::Oidc;
use super::push::Inside;
use super::serving::Begun;
use super::sockets::{self, Sockets};
use super::streams::Streams;
use super::{Gateway, Wanted};
use crate::devices::exposed_on;

impl Gateway {
    /// Makes all that is needed before the first packet.
    pub(super) async fn begin(
        &self,
        wanted: &Wanted,
    ) -> Result<(Begun, mpsc::Receiver<Event>), ApiError> {
        let network = self.networks.join(Some(wanted.network())).await?;
        self.check_way_out(wanted, &network)?;
        let conflict = |error: String| ApiError::new(ErrorKind::Conflict, error);
        let import = self.imported()?;
        if let Some(why) = self.program_fault(wanted) {
            return Err(conflict(why));
        }
        let own = import.as_ref().and_then(|import| import.own(&network.name));
        let request = ExposeRequest {
            network: Some(network.name.clone()),
            addresses: self.own_addresses(network.vni, own).await,
            ..ExposeRequest::default()
        };
        let host: Attachment = self.attachments.expose(request).await?;
        let (settings, logins) = (wanted.request.login.clone(), Arc::clone(&self.logins));
        // The disk may be slow.
        let prepared = tokio::task::spawn_blocking(move || logins.prepare(&settings)).await;
        prepared.map_err(|error| ApiError::new(ErrorKind::Internal, error))?;
        let oidc = offered(&wanted.request.login).await?;
        let sockets = sockets::bind_all(&wanted.request.listen);
        let Sockets { udp, listeners } = sockets.map_err(|error| conflict(error.to_string()))?;
        let streams = Streams::new(listeners).map_err(|error| conflict(error.to_string()))?;
        let opened = DataChannel::open(wanted, udp, &self.kernel).await;
        let (channel, events) = opened.map_err(|error| conflict(error.to_string()))?;
        if let Some(reason) = channel.reason() {
            tracing::info!(reason, "the kernel does not move packets of OpenVPN clients");
        }
        let has_ipv6 = self.kernel.forwarding().is_ok_and(|forwarding| forwarding.ipv6);
        let inside = Inside {
            own: host.addresses.clone(),
            domain: self.domain.clone(),
            ping_s: wanted.ping_s(),
            ping_restart_s: wanted.ping_restart_s(),
            redirect_gateway: wanted.request.redirect_gateway,
            pushes: wanted.request.pushes.clone(),
        };
        let has_ipv6 = has_ipv6 && inside.own(false).is_some();
        if inside.own(true).is_none() {
            return Err(conflict("this host has no IPv4 address on the network".into()));
        }
        let (config, options) = match &import {
            Some(import) => {
                let options = import.options(&channel.ciphers(), wanted.request.login.auth);
                (import.gate(), options.map_err(conflict)?)
            }
            None => self.own_options(wanted, channel.ciphers())?,
        };
        let threads_max = std::thread::available_parallelism().map_or(1, usize::from);
        let begun = Begun {
            streams,
            channel: Arc::new(channel),
            gate: Gate::new(Instant::now(), config, &rand::random()),
            options,
            exposed: exposed_on(network.vni),
            network,
            login: wanted.request.login.clone(),
            oidc,
            has_ipv6,
            ways: self.ways(wanted, &inside, has_ipv6),
            inside,
            threads_max,
        };
        Ok((begun, events))
    }

    /// How the gateway serves by this host's own authority.
    pub(super) fn own_options(
        &self,
        wanted: &Wanted,
        ciphers: Vec<DataCipher>,
    ) -> Result<(GateConfig, ServerOptions), ApiError> {
        let authority = self.authority_now().ok_or_else(no_authority)?;
        let client_keys = Some(Arc::new(authority.wrapping_key().map_err(refusal)?));
        let tls = authority.tls(wanted.request.login.auth.has_certificate()).map_err(refusal)?;
        let config = GateConfig { wrap: None, client_keys, ..GateConfig::default() };
        let link = LinkOptions { tun_mtu: MTU, ..LinkOptions::default() };
        Ok((config, ServerOptions { link, ..ServerOptions::new(tls, ciphers) }))
    }
}

/// The logins by a web page, where these are asked for.
async fn offered(login: &LoginSettings) -> Result<Option<Oidc>, ApiError> {
    let Some(settings) = &login.oidc else { return Ok(None) };
    // A certificate says whose client it is only where it must have the user's name.
    let asks_always = login.client_name != ClientName::Same;
    let opened = Oidc::open(settings, asks_always).await;
    opened.map(Some).map_err(|error| ApiError::new(ErrorKind::Conflict, error))
}

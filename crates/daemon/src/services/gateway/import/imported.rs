//! A configuration that was taken over, as the gateway serves by it.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_lc_rs::digest::{SHA256, digest};
use ipnet::IpNet;
use rustls::pki_types::CertificateDer;
use weft_api::{Auth, Listen, Protocol, ServeRequest};
use weft_crypto::DataCipher;
use weft_openvpn::config::{ClientFile, NameKind, Proto, ServerSettings, TlsSettings};
use weft_openvpn::device::Side;
use weft_openvpn::gate::GateConfig;
use weft_openvpn::key_method::LinkOptions;
use weft_openvpn::session::{ServerOptions, Timing};
use weft_openvpn::wrap::{AuthDigest, AuthDirection, ServerKey, WrapKeys};
use x509_parser::certificate::X509Certificate;
use x509_parser::prelude::FromDer;

use super::reading::{DEFAULT_FILE, Reading, all_pushes, networks_of, pings};
use super::trust::{Revocations, certificates, tls};
use super::{Saved, watching};
use crate::services::gateway::authority::{Holder, serial_of};
use crate::services::gateway::device::MTU;
use crate::services::gateway::management::Password;
use crate::services::gateway::push::{Inside, route_of};
use crate::services::gateway::sockets::PORT;
use crate::services::gateway::{PING_RESTART_S, PING_S, Wanted};

/// The longest common name of a certificate, in bytes, as X.520 has it.
const NAME_BYTES_MAX: usize = 64;

/// What a refused client shows to its user.
const NO_NAME: &str = "The certificate names no client";
const REVOKED: &str = "The certificate is revoked";
const EXPIRED: &str = "The list of revoked certificates has ended: tell the administrator";
const DISABLED: &str = "This client is disabled";
const NO_FILE: &str = "This client has no file on the server";
const OTHER_NAME: &str = "The certificate has another name than this server takes";
const NO_USAGE: &str = "The certificate is none of a client, by its extended key usage";
const NOT_LISTED: &str = "The certificate is none of those that this server takes";

/// A configuration that was taken over.
pub(in crate::services::gateway) struct Imported {
    pub(super) saved: Saved,
    pub(super) settings: ServerSettings,
    /// By the names of the files.
    pub(super) clients: BTreeMap<String, ClientFile>,
    pub(super) revocations: Revocations,
}

impl Imported {
    /// What is saved, read anew.
    ///
    /// # Errors
    /// It cannot be served by: why.
    pub(super) fn new(saved: Saved) -> Result<Self, String> {
        let Reading { settings, clients, .. } = Reading::of(&saved);
        let revocations = revocations(&saved, &settings.tls)?;
        Ok(Self { saved, settings, clients, revocations })
    }

    /// Which configuration it is: a later one has another number.
    pub(in crate::services::gateway) fn id(&self) -> u64 {
        self.saved.id
    }

    /// The network that clients join.
    pub(in crate::services::gateway) fn network(&self) -> &str {
        &self.saved.network
    }

    /// This host's own address on a network, if that is the clients' network.
    pub(in crate::services::gateway) fn own(&self, network: &str) -> Option<IpNet> {
        self.saved.own.filter(|_| self.saved.network == network && !self.saved.is_replica)
    }

    /// Where to listen; none: as without a configuration.
    fn listens(&self) -> Vec<Listen> {
        let ServerSettings { listens, port, proto, .. } = &self.settings;
        if listens.is_empty() && *port == PORT && *proto == Proto::default() {
            return Vec::new();
        }
        let place = |proto: Proto, address: Option<IpAddr>, port: u16| {
            // As with OpenVPN, a socket of IPv6 takes IPv4, too.
            let all_ipv4 = (proto.is_ipv6 == Some(false)).then_some(Ipv4Addr::UNSPECIFIED.into());
            let protocol = if proto.is_tcp { Protocol::Tcp } else { Protocol::Udp };
            Listen { protocol, address: address.or(all_ipv4), port }
        };
        if listens.is_empty() {
            return vec![place(*proto, None, *port)];
        }
        let of = |listen: &weft_openvpn::config::Listen| {
            let address = listen.host.as_deref().and_then(|host| host.parse::<IpAddr>().ok());
            place(listen.proto.unwrap_or(*proto), address, listen.port.unwrap_or(*port))
        };
        listens.iter().map(of).collect()
    }

    /// Seconds until a ping, and until a client connects again; `None`: the configuration does not say.
    fn pings(&self) -> (Option<u32>, Option<u32>) {
        let (ping, restart) = pings(&self.settings);
        (Some(ping).filter(|ping| *ping > 0), Some(restart).filter(|restart| *restart > 0))
    }

    /// A request to serve, with what the configuration says where the request says nothing.
    pub(in crate::services::gateway) fn fill(&self, request: ServeRequest) -> ServeRequest {
        let (ping_s, ping_restart_s) = self.pings();
        let network = self.saved.network.clone();
        let listen = match request.listen.is_empty() {
            true => self.listens(),
            false => request.listen,
        };
        ServeRequest {
            listen,
            network: request.network.or(Some(network)),
            ping_s: request.ping_s.or(ping_s),
            ping_restart_s: request.ping_restart_s.or(ping_restart_s),
            tools: watching::filled(request.tools, watching::tools(&self.settings)),
            login: self.login(request.login),
            ..request
        }
    }

    /// What is wanted of a gateway that served by another configuration, or none: what was said by hand stays.
    pub(super) fn follow(&self, wanted: Wanted, before: Option<&Self>) -> Wanted {
        let unsaid = ServeRequest::default();
        let had = before.map_or(unsaid.clone(), |before| before.fill(unsaid.clone()));
        let now = self.fill(unsaid);
        let Wanted { mut request, program, is_by_file, .. } = wanted;
        if request.listen == had.listen {
            request.listen = now.listen;
        }
        if request.ping_s.unwrap_or(PING_S) == had.ping_s.unwrap_or(PING_S) {
            request.ping_s = now.ping_s.or(Some(PING_S));
        }
        let had_restart_s = had.ping_restart_s.unwrap_or(PING_RESTART_S);
        if request.ping_restart_s.unwrap_or(PING_RESTART_S) == had_restart_s {
            request.ping_restart_s = now.ping_restart_s.or(Some(PING_RESTART_S));
        }
        if request.tools == had.tools {
            request.tools = now.tools;
        }
        if request.login == had.login {
            request.login = now.login;
        }
        request.network = Some(self.saved.network.clone());
        Wanted { request, import: Some(self.saved.id), program, is_by_file }
    }

    /// The password of the management interface, by the file that the configuration names.
    pub(in crate::services::gateway) fn management_password(&self) -> Option<Password> {
        watching::password(&self.settings)
    }

    /// The variables for a program that judges clients.
    pub(super) fn variables(&self) -> Vec<(String, String)> {
        self.settings.environment.clone()
    }

    /// Clients at most.
    pub(in crate::services::gateway) fn clients_max(&self) -> usize {
        usize::try_from(self.settings.clients_max).unwrap_or(usize::MAX)
    }

    /// Whether a name may be connected several times.
    pub(in crate::services::gateway) const fn allows_duplicates(&self) -> bool {
        self.settings.allows_duplicates
    }

    /// Whether clients reach each other.
    pub(in crate::services::gateway) const fn connects_clients(&self) -> bool {
        self.settings.connects_clients
    }

    /// How first packets are wrapped, and how many are answered.
    pub(in crate::services::gateway) fn gate(&self) -> GateConfig {
        let ServerSettings { tls_crypt_v2, first_packet_rate, forces_cookie, .. } = &self.settings;
        let plain = tls_crypt_v2.is_none().then_some(WrapKeys::None);
        let key = |key: &weft_openvpn::static_key::ServerKeyV2| ServerKey::new(key.expose());
        GateConfig {
            wrap: self.wrap().or(plain),
            client_keys: tls_crypt_v2.as_ref().map(key).map(Arc::new),
            always_cookie: *forces_cookie,
            hand_window: seconds(self.settings.tls.handshake_s),
            resets_max: first_packet_rate.count,
            resets_interval: seconds(first_packet_rate.seconds),
        }
    }

    fn wrap(&self) -> Option<WrapKeys> {
        let tls = &self.settings.tls;
        if let Some(key) = &tls.tls_crypt {
            return Some(WrapKeys::tls_crypt(key, Side::Server));
        }
        let digest: AuthDigest = tls.auth_digest.parse().unwrap_or_default();
        let direction = match tls.key_direction {
            None => AuthDirection::Both,
            Some(0) => AuthDirection::Zero,
            Some(_) => AuthDirection::One,
        };
        tls.tls_auth.as_ref().map(|key| WrapKeys::tls_auth(key, digest, direction))
    }

    /// What all sessions have in common, on a device with these ciphers, if clients log in so.
    ///
    /// # Errors
    /// The certificates cannot be used: why.
    pub(in crate::services::gateway) fn options(
        &self,
        device: &[DataCipher],
        auth: Auth,
    ) -> Result<ServerOptions, String> {
        let settings = &self.settings.tls;
        let all = settings.ciphers.iter().copied();
        let ciphers: Vec<DataCipher> = all.filter(|cipher| device.contains(cipher)).collect();
        if ciphers.is_empty() {
            return Err(
                "the device has none of the ciphers of data-ciphers: serve with --engine userspace"
                    .into(),
            );
        }
        let renew = Some(settings.renew_s).filter(|renew_s| *renew_s > 0);
        let tls = tls(settings, self.client_cert(auth))?;
        let mut options = ServerOptions::new(tls, ciphers);
        options.policy.fallback = settings.fallback.filter(|cipher| device.contains(cipher));
        options.timing = Timing {
            hand_window: seconds(settings.handshake_s),
            transition_window: seconds(settings.transition_s),
            renegotiate_after: renew.map(seconds),
        };
        options.link = LinkOptions {
            tun_mtu: MTU,
            is_tcp: false,
            cipher: settings.fallback,
            auth_digest: settings.auth_digest.clone(),
            has_tls_auth: settings.tls_auth.is_some(),
            key_direction: settings.key_direction,
        };
        Ok(options)
    }

    /// Whose certificate this is, which TLS has verified.
    ///
    /// # Errors
    /// Why it is not let in.
    pub(in crate::services::gateway) fn holder(
        &self,
        certificate: &CertificateDer<'_>,
    ) -> Result<Holder, &'static str> {
        let encoded = certificate;
        let (_, certificate) = X509Certificate::from_der(encoded).map_err(|_| NO_NAME)?;
        let subject = certificate.subject();
        let name = subject.iter_common_name().last().and_then(|name| name.as_str().ok());
        let name = name.filter(|name| (1..=NAME_BYTES_MAX).contains(&name.len()));
        // As OpenVPN does.
        let name = name.ok_or(NO_NAME)?.replace(char::is_control, "_");
        let tls = &self.settings.tls;
        let is_client = || {
            let usage = certificate.extended_key_usage().ok().flatten();
            usage.is_some_and(|usage| usage.value.client_auth)
        };
        if tls.checks_usage && !is_client() {
            return Err(NO_USAGE);
        }
        let is_right = tls.name_check.as_ref().is_none_or(|check| match check.kind {
            NameKind::Subject => check.name == subject.to_string(),
            NameKind::Name => check.name == name,
            NameKind::NamePrefix => name.starts_with(&check.name),
        });
        if !is_right {
            return Err(OTHER_NAME);
        }
        let fingerprint = || digest(&SHA256, encoded);
        if !tls.fingerprints.is_empty()
            && !tls.fingerprints.iter().any(|known| known == fingerprint().as_ref())
        {
            return Err(NOT_LISTED);
        }
        let issuer = certificate.issuer().as_raw().to_vec();
        let serial = serial_of(certificate.raw_serial());
        Ok(Holder { name, serial, issuer, above: Vec::new() })
    }

    /// Why a client with this certificate is not let in now.
    pub(in crate::services::gateway) fn refusal(&self, holder: &Holder) -> Option<&'static str> {
        if self.revocations.expired(SystemTime::now()).is_some() {
            return Some(EXPIRED);
        }
        self.is_revoked(holder).then_some(REVOKED)
    }

    /// Why no client of this name is let in now.
    pub(in crate::services::gateway) fn refusal_of(&self, name: &str) -> Option<&'static str> {
        if self.client(name).is_some_and(|file| file.is_disabled) {
            return Some(DISABLED);
        }
        let has_file = || self.clients.contains_key(&file_name(name));
        (self.settings.needs_client_file && !has_file()).then_some(NO_FILE)
    }

    /// Whether a certificate is revoked, by a list or by `weft openvpn revoke`.
    pub(in crate::services::gateway) fn is_revoked(&self, holder: &Holder) -> bool {
        let Holder { name, serial, issuer, above } = holder;
        let is_issued_here = || self.saved.issued.iter().find(|issued| issued.serial == *serial);
        let is_taken_back = match is_issued_here() {
            Some(issued) => issued.revoked.is_some(),
            None => self.saved.revoked_names.contains_key(name),
        };
        let is_listed = |issuer: &[u8], serial: &str| self.revocations.has(issuer, serial);
        is_taken_back
            || is_listed(issuer, serial)
            || above.iter().any(|(issuer, serial)| is_listed(issuer, serial))
    }

    /// Why all clients are refused now.
    pub(in crate::services::gateway) fn fault(&self) -> Option<String> {
        self.revocations.expired(SystemTime::now())
    }

    /// Whether a client without an address of its own gets one.
    pub(in crate::services::gateway) fn gives_address(&self, name: &str) -> bool {
        self.settings.has_pool || self.client(name).is_some_and(|file| file.ipv4.is_some())
    }

    /// The address that a client always has, and that which it had last, if that is kept for it.
    pub(in crate::services::gateway) fn kept(
        &self,
        name: &str,
    ) -> (Option<Ipv4Addr>, Option<Ipv4Addr>) {
        let fixed = self.client(name).and_then(|file| file.ipv4);
        (fixed.map(|(address, _)| address), self.saved.last.get(name).copied())
    }

    /// Whether there are networks behind any client.
    pub(in crate::services::gateway) fn has_networks(&self) -> bool {
        self.clients.values().any(|file| !networks_of(file).is_empty())
    }

    /// The networks behind a client.
    pub(in crate::services::gateway) fn networks(&self, name: &str) -> Vec<IpNet> {
        self.client(name).map(networks_of).unwrap_or_default()
    }

    /// The options that a client is pushed.
    pub(in crate::services::gateway) fn pushes(
        &self,
        name: &str,
        inside: &Inside,
        addresses: &[IpAddr],
    ) -> Vec<String> {
        let common = self.settings.pushes.clone();
        let file = self.client(name);
        let mut pushed = file.map_or(common.clone(), |file| file.apply_pushes(&common));
        let own = self.networks(name);
        // Nobody is sent through the tunnel to the network behind itself.
        pushed.retain(|option| route_of(option).is_none_or(|route| !own.contains(&route)));
        if let (true, Some(server), Some(here)) =
            (self.saved.is_replica, self.saved.own, inside.own(true))
        {
            // The server that an option names by its address is here this host.
            let (server, here) = (server.addr().to_string(), here.addr().to_string());
            for option in pushed.iter_mut().filter(|option| option.starts_with("dhcp-option ")) {
                let words =
                    option.split(' ').map(|word| if word == server { here.as_str() } else { word });
                *option = words.collect::<Vec<&str>>().join(" ");
            }
        }
        inside.options_with(addresses, &pushed)
    }

    /// All options that some clients are pushed.
    pub(in crate::services::gateway) fn all_pushes(&self) -> impl Iterator<Item = &String> {
        all_pushes(&self.settings, &self.clients)
    }

    fn client(&self, name: &str) -> Option<&ClientFile> {
        self.clients.get(&file_name(name)).or_else(|| self.clients.get(DEFAULT_FILE))
    }
}

/// The revoked certificates of a configuration: by its own lists, and by those that came after it.
pub(super) fn revocations(saved: &Saved, tls: &TlsSettings) -> Result<Revocations, String> {
    let lists: Vec<&str> =
        [&saved.crl, &tls.crl].into_iter().filter_map(|it| it.as_deref()).collect();
    if lists.is_empty() {
        return Ok(Revocations::default());
    }
    let ca = certificates("ca", tls.ca.as_deref().unwrap_or_default())?;
    Revocations::read(&lists.join("\n"), &ca)
}

/// The name of a client's file, as OpenVPN makes it.
fn file_name(name: &str) -> String {
    name.replace('/', "_")
}

fn seconds(count: u32) -> Duration {
    Duration::from_secs(count.into())
}

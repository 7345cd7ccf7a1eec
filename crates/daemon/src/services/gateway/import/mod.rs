//! Takes over the configuration of an OpenVPN server (`weft openvpn import`).
//!
//! The file of the state directory has the configuration as it was given, with all files that it names: it is read
//! anew at each start. The clients' addresses are claimed from the mesh at the import, so that nobody else gets them
//! while a client is away.

mod imported;
mod issue;
mod logins;
mod places;
mod reading;
mod shared;
mod trust;
mod watching;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError};
use std::time::SystemTime;

use ipnet::IpNet;
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use weft_api::{ApiError, CrlRequest, ErrorKind, ImportReport, ImportRequest};
use weft_openvpn::config::{TlsSettings, VerifyClientCert};
use zeroize::Zeroizing;

pub(super) use self::imported::Imported;
use self::imported::revocations;
use self::places::Place;
use self::reading::{Reading, pool_addresses};
use super::Gateway;
use super::authority::{Holder, Issued, holder_of};
use super::login;
use super::serving::Command;
use crate::timestamp;

/// The file of the configuration. It holds private keys.
pub(super) const FILE: &str = "openvpn-import.json";
/// What a refused client shows to its user.
const NO_NAME: &str = "The certificate names no client";

/// A configuration, as it is saved.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(super) struct Saved {
    id: u64,
    /// The same for all later configurations of the host that has taken it over, and on all hosts that serve by it.
    /// 0: as `id`.
    #[serde(default)]
    family: u64,
    /// It is the word of another host, which has taken it over.
    #[serde(default)]
    is_replica: bool,
    config: Zeroizing<String>,
    files: BTreeMap<String, Zeroizing<String>>,
    unread: BTreeMap<String, String>,
    client_files: BTreeMap<String, String>,
    /// The list of revoked certificates that came after the configuration.
    crl: Option<String>,
    ca_key: Option<Zeroizing<String>>,
    /// The program that judges passwords in the place of those that the configuration names.
    #[serde(default)]
    auth_program: Option<PathBuf>,
    network: String,
    /// The server's address on the network, which the host has that has taken it over.
    own: Option<IpNet>,
    /// The addresses that clients without a fixed one had last, and that are kept for them.
    #[serde(default)]
    last: BTreeMap<String, std::net::Ipv4Addr>,
    issued: Vec<Issued>,
    /// Names whose certificates count no more, but for those in `issued`, and since when.
    revoked_names: BTreeMap<String, String>,
}

/// What the gateway serves by: nothing, a configuration, or why that cannot be read.
pub(super) type Import = Option<Result<Arc<Imported>, String>>;

/// A configuration that may be taken over.
struct Draft {
    saved: Saved,
    reading: Reading,
    /// The clients' last addresses, by the file of the pool.
    pool: Vec<(String, std::net::Ipv4Addr)>,
    report: ImportReport,
}

impl Saved {
    const fn family(&self) -> u64 {
        if self.family == 0 { self.id } else { self.family }
    }

    fn read(&self, path: &str) -> Result<String, String> {
        match (self.files.get(path), self.unread.get(path)) {
            (Some(text), _) => Ok(text.to_string()),
            (None, Some(why)) => Err(why.clone()),
            (None, None) => Err("no such file".to_owned()),
        }
    }
}

/// What was saved, for a gateway that begins.
pub(super) fn restored(saved: Option<Saved>) -> Import {
    saved.map(|saved| Imported::new(saved).map(Arc::new))
}

impl Gateway {
    /// `weft openvpn import`: reports on a configuration, and takes it over, entirely or not at all.
    pub(crate) async fn import(
        self: Arc<Self>,
        request: ImportRequest,
    ) -> Result<ImportReport, ApiError> {
        let _one = self.changing.lock().await;
        let (dry_run, without_refused) = (request.dry_run, request.without_refused);
        let (network, replace) = (request.network.clone(), request.replace);
        let before = self.imported_now();
        let drafted = aside(move || Draft::new(request, before.as_deref())).await?;
        let mut draft = drafted;
        if !replace {
            draft.report.faults.extend(self.own_clients());
            draft.report.faults.extend(self.import_elsewhere());
        }
        let place = self.place_for(&draft.reading, network.as_deref()).await;
        let place = place.map_err(|fault| draft.report.faults.push(fault)).ok();
        if let Some(place) = &place {
            draft.put(place);
        }
        if draft.reading.leads_out() {
            draft.report.faults.extend(self.forwarding_fault());
        }
        let in_the_way = draft.reading.in_the_way(without_refused);
        draft.report.lines = std::mem::take(&mut draft.reading.lines);
        draft.report.faults.append(&mut draft.reading.faults);
        let is_good = draft.report.faults.is_empty() && in_the_way == 0;
        draft.report.is_possible = is_good;
        let Some(place) = place.filter(|_| is_good && !dry_run) else { return Ok(draft.report) };
        self.take_over(draft, place).await
    }

    async fn take_over(
        self: &Arc<Self>,
        draft: Draft,
        place: Place,
    ) -> Result<ImportReport, ApiError> {
        let Draft { mut saved, reading, pool, mut report } = draft;
        let before = self.imported_now();
        let kept = self.move_in(&place, &reading, &pool).await?;
        let earlier = before.as_ref().filter(|before| before.saved.network == saved.network);
        saved.last = earlier.map(|earlier| earlier.saved.last.clone()).unwrap_or_default();
        saved.last.extend(kept.last.clone());
        if let Err(error) = self.save_import(saved).await {
            self.release(&kept.new).await;
            return Err(error);
        }
        self.release(&kept.stale).await;
        self.tell_addresses(&kept.new).await;
        report.kept_addresses = kept.count;
        report.imported = true;
        // A gateway that serves already goes on with the new configuration.
        if let (Some(wanted), Some(now)) = (self.wanted_now(), self.imported_now()) {
            let wanted = now.follow(wanted, before.as_deref());
            self.set_wanted(Some(wanted.clone())).await?;
            self.begun(&wanted).await?;
        }
        Ok(report)
    }

    /// `weft openvpn import --crl`: replaces the list of revoked certificates, and ends the sessions of those.
    pub(crate) async fn import_crl(
        self: Arc<Self>,
        request: CrlRequest,
    ) -> Result<ImportReport, ApiError> {
        let _one = self.changing.lock().await;
        let before = self.imported_now().ok_or_else(|| {
            let text = "no configuration of an OpenVPN server was taken over here: \
                        weft openvpn import FILE, or weft openvpn revoke NAME";
            ApiError::new(ErrorKind::Conflict, text)
        })?;
        if let Some(why) = self.import_elsewhere() {
            return Err(ApiError::new(ErrorKind::Conflict, why));
        }
        let saved = Saved { crl: Some(request.crl), ..before.saved.clone() };
        let tls = before.settings.tls.clone();
        let checked = aside(move || {
            let own = revocations(&saved, &TlsSettings { crl: None, ..tls.clone() })?;
            let ended = own.expired(SystemTime::now());
            if let Some(why) = ended.or_else(|| own.older_than(&before.revocations)) {
                return Err(why);
            }
            let revocations = revocations(&saved, &tls)?;
            if !saved.crl.as_deref().unwrap_or_default().contains("-----BEGIN X509 CRL-----") {
                return Err("the file holds no \"X509 CRL\" in PEM: name the right file".into());
            }
            match revocations.expired(SystemTime::now()) {
                Some(why) => Err(why),
                None => Ok(saved),
            }
        });
        let saved = checked.await?;
        let saved = saved.map_err(|why: String| ApiError::new(ErrorKind::Conflict, why))?;
        self.save_import(saved).await?;
        self.ask(|reply| Command::EndRevoked { reply }).await;
        let now = self.imported_now();
        Ok(now.map(|now| now.report()).unwrap_or_default())
    }

    /// The configuration that was taken over, if there is one and it can be read.
    pub(super) fn imported_now(&self) -> Option<Arc<Imported>> {
        self.imported().ok().flatten()
    }

    /// The configuration that was taken over.
    ///
    /// # Errors
    /// There is one that cannot be read any more.
    pub(super) fn imported(&self) -> Result<Option<Arc<Imported>>, ApiError> {
        let import = self.import.lock().unwrap_or_else(PoisonError::into_inner);
        match &*import {
            None => Ok(None),
            Some(Ok(imported)) => Ok(Some(Arc::clone(imported))),
            Some(Err(why)) => {
                let text = format!(
                    "the configuration that was taken over cannot be used ({why}): weft openvpn import FILE anew"
                );
                Err(ApiError::new(ErrorKind::Conflict, text))
            }
        }
    }

    /// Whose certificate this is, which TLS has verified, if it is let in.
    ///
    /// # Errors
    /// Why it is not, for the client's user.
    pub(super) fn holder(
        &self,
        certificate: Option<&CertificateDer<'_>>,
    ) -> Result<Holder, &'static str> {
        let certificate = certificate.ok_or(NO_NAME)?;
        match self.imported_now() {
            Some(import) => {
                let holder = import.holder(certificate)?;
                import.refusal(&holder).map_or(Ok(holder), Err)
            }
            None => holder_of(certificate).ok_or(NO_NAME),
        }
    }

    /// The variables for a program that judges clients.
    pub(super) fn variables(&self) -> Vec<(String, String)> {
        self.imported_now().map(|import| import.variables()).unwrap_or_default()
    }

    /// Why a client of this name is not let in, whoever it has shown to be.
    pub(super) fn refusal_of(&self, name: &str) -> Option<&'static str> {
        self.imported_now()?.refusal_of(name)
    }

    /// Saves a configuration, and serves by it from now on.
    async fn save_import(self: &Arc<Self>, saved: Saved) -> Result<(), ApiError> {
        let gateway = Arc::clone(self);
        let done = aside(move || {
            let imported = Imported::new(saved.clone());
            let imported = imported.map_err(|why| ApiError::new(ErrorKind::Conflict, why))?;
            if gateway.is_replica() {
                // The users and the key for tokens were the home's, and are this host's own from now on.
                let taken = gateway.logins.become_home(None);
                taken.map_err(|error| ApiError::new(ErrorKind::Unavailable, error))?;
            }
            let stored = gateway.store.save(FILE, &saved);
            stored.map_err(|error| ApiError::new(ErrorKind::Unavailable, error))?;
            let import = Some(Ok(Arc::new(imported)));
            *gateway.import.lock().unwrap_or_else(PoisonError::into_inner) = import;
            gateway.authority_changed();
            Ok(())
        });
        done.await?
    }

    /// Clients of this host's own authority, which would count no more.
    fn own_clients(&self) -> Option<String> {
        if self.imported_now().is_some() {
            return None;
        }
        let clients = self.authority_now()?.shown().ok()?.clients;
        (clients > 0).then(|| {
            format!(
                "this host's own authority (weft ca init) has issued {clients} certificates, which would count no more: weft openvpn import --replace does it"
            )
        })
    }
}

impl Draft {
    /// Reads a configuration, and finds what is wrong with its keys and certificates.
    fn new(request: ImportRequest, before: Option<&Imported>) -> Self {
        let ImportRequest { config, files, unread, client_files, pool, .. } = request;
        let ImportRequest { ca_key, auth_program, .. } = request;
        let mut saved = Saved {
            id: rand::random::<u64>() >> 12,
            config: Zeroizing::new(config),
            files: files.into_iter().map(|(path, text)| (path, Zeroizing::new(text))).collect(),
            unread,
            client_files,
            ca_key: ca_key.map(Zeroizing::new),
            auth_program,
            ..Saved::default()
        };
        // Other hosts follow this one, not one in the place of another host's.
        let earlier = before.filter(|before| !before.is_replica());
        saved.family = earlier.map_or(saved.id, |earlier| earlier.saved.family());
        let reading = Reading::of(&saved);
        let tls = &reading.settings.tls;
        if let Some(before) = before.filter(|before| before.shares_authority(tls)) {
            let Saved { issued, revoked_names, ca_key, crl, .. } = before.saved.clone();
            (saved.issued, saved.revoked_names) = (issued, revoked_names);
            let ca_key = ca_key.filter(|key| issue::key_fault(key, tls).is_none());
            saved.ca_key = saved.ca_key.or(ca_key);
            let ca = trust::certificates("ca", tls.ca.as_deref().unwrap_or_default());
            saved.crl = crl.and_then(|crl| trust::lists_of(&crl, &ca.unwrap_or_default()));
        }
        let mut report = ImportReport { client_files: reading.clients.len(), ..Default::default() };
        let client_cert = reading.settings.client_cert;
        let has_ca = tls.ca.is_some() || client_cert == VerifyClientCert::None;
        let is_whole = has_ca && tls.cert.is_some() && tls.key.is_some();
        if is_whole {
            report.faults.extend(trust::faults(tls, client_cert, SystemTime::now()));
        }
        let login = logins::settings(&reading.settings, saved.auth_program.as_deref());
        report.faults.extend(login::fault(&login));
        if saved.auth_program.is_some() && !login.auth.has_password() {
            let text = "the server asks for no passwords: leave --auth-program out";
            report.faults.push(text.into());
        }
        match revocations(&saved, tls) {
            Ok(revocations) => {
                report.faults.extend(revocations.expired(SystemTime::now()));
                report.revoked = revocations.len();
                report.crl_until = revocations.ends().map(timestamp::format);
            }
            Err(_) if !is_whole => {}
            Err(fault) => report.faults.push(fault),
        }
        if let Some(key) = &saved.ca_key {
            report.faults.extend(issue::key_fault(key, tls));
            report.makes_profiles = true;
        }
        let pool = pool.unwrap_or_default();
        let pool = pool_addresses(&pool, reading.settings.topology).collect();
        Self { saved, reading, pool, report }
    }

    /// Settles where the clients are, and whether their fixed addresses fit there.
    fn put(&mut self, place: &Place) {
        let own = place.own_ipv4().unwrap_or(std::net::Ipv4Addr::UNSPECIFIED);
        self.reading.check_addresses(place.range, own);
        self.reading.check_range6(&place.name, place.range6);
        self.saved.network.clone_from(&place.name);
        self.saved.own = place.own;
        self.report.network.clone_from(&place.name);
        self.report.range = Some(IpNet::V4(place.range));
    }
}

impl Imported {
    /// Whether certificates that count for it may count by these settings, too.
    fn shares_authority(&self, tls: &TlsSettings) -> bool {
        let before = &self.settings.tls.ca;
        let (one, other) = (before.as_deref().unwrap_or_default(), tls.ca.as_deref());
        *before == tls.ca || trust::share_certificate(one, other.unwrap_or_default())
    }

    /// What is known of it, without its lines.
    fn report(&self) -> ImportReport {
        ImportReport {
            is_possible: true,
            imported: true,
            network: self.saved.network.clone(),
            client_files: self.clients.len(),
            revoked: self.revocations.len(),
            crl_until: self.revocations.ends().map(timestamp::format),
            makes_profiles: self.saved.ca_key.is_some(),
            ..ImportReport::default()
        }
    }
}

/// Does something that may take long on a thread of its own.
async fn aside<T: Send + 'static>(job: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(job).await;
    done.map_err(|error| ApiError::new(ErrorKind::Internal, error))
}

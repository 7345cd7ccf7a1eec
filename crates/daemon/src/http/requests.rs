//! The API's requests, answered from links, control loop and attachments.

use std::sync::Arc;

use tokio::sync::oneshot;
use weft_api::{
    ApiError, ConnectRequest, DetachRequest, Detached, DnsLookupRequest, DnsRecord, ErrorKind,
    ForgetRequest, Invitation, Ipam, Report, Traffic, Workers,
};
use weft_link::{KeyHash, LinkState, Target};

use super::daemon::Daemon;
use super::views;
use crate::core::control::{Request, Snapshot};
use crate::core::targets::TARGETS_FILE;
use crate::timestamp;
use crate::upkeep::mtu::narrow_link;
use crate::upkeep::reach::own_address;

/// Frames from the switch for the vector engine that were dropped because the queue of its TAP device was full.
const TAP_QUEUE_FULL: &str = "tap_queue_full";

impl Daemon {
    /// The command line that another host needs to join, with the current address of this host.
    pub(crate) async fn invitation(&self) -> Invitation {
        let host = own_address(self.settings.host, &self.kernel)
            .await
            .unwrap_or_else(|| self.settings.nickname.clone());
        let host = match self.settings.port {
            weft_link::DEFAULT_PORT => host,
            port if host.contains(':') => format!("[{host}]:{port}"),
            port => format!("{host}:{port}"),
        };
        let narrow_link =
            narrow_link(self.link_mtu, self.settings.engine, self.settings.switch.kind());
        if self.settings.password.is_some() {
            let join = format!("weft launch --password-file FILE {host}");
            return Invitation { join, token: None, token_lifetime_s: None, narrow_link };
        }
        let join = format!("weft launch {host}#{}", KeyHash::short(self.local));
        let token = self.links.new_token().map(|token| token.expose_text().to_string());
        let token_lifetime_s = token.is_some().then_some(weft_link::limits::TOKEN_LIFETIME_S);
        Invitation { join, token, token_lifetime_s, narrow_link }
    }

    async fn snapshot(&self) -> Result<Snapshot, ApiError> {
        let (reply, answer) = oneshot::channel();
        let _ = self.control.send(Request::Snapshot { reply }).await;
        answer.await.map_err(|_| ApiError::new(ErrorKind::Unavailable, "weft is stopping"))
    }

    pub(crate) async fn report(&self) -> Result<Report, ApiError> {
        let snapshot = self.snapshot().await?;
        let links = self.links.status();
        let connections = views::connections(&links, &snapshot);
        let attachments = self.attachments.list().await;
        let mut status = views::status(self, &snapshot, &connections, &attachments);
        status.gateway = self.gateway.status().await;
        let mut counters = views::counters(&snapshot);
        counters.insert("events_lost".into(), self.events_lost.events());
        counters.insert("probes_over_limit".into(), self.events_lost.probes());
        counters.extend(self.names.counters().all());
        Ok(Report {
            status,
            paths: views::paths(&links, &snapshot.paths),
            peers: views::peers(&snapshot.peers, &connections),
            targets: self.target_list(),
            attachments,
            counters,
            kernel_counters: views::kernel_counters(&snapshot.kernel),
            peer_counters: views::peer_counters(&snapshot.counters),
            worker_counters: views::worker_counters(&snapshot.counters),
            connections,
        })
    }

    pub(crate) async fn traffic(&self) -> Result<Traffic, ApiError> {
        let (containers, tap_queue_full) = self.attachments.traffic().await?;
        let (reply, answer) = oneshot::channel();
        let _ = self.control.send(Request::Traffic { reply }).await;
        let readings =
            answer.await.map_err(|_| ApiError::new(ErrorKind::Unavailable, "weft is stopping"))?;
        let monotonic_ms = timestamp::monotonic_ms();
        let mut traffic = views::traffic(&readings, containers, &self.links.status(), monotonic_ms);
        traffic.drops.insert(TAP_QUEUE_FULL.into(), tap_queue_full);
        Ok(traffic)
    }

    pub(crate) async fn ask_workers(&self, wanted: Option<usize>) -> Result<Workers, ApiError> {
        let (reply, answer) = oneshot::channel();
        let _ = self.control.send(Request::Workers { wanted, reply }).await;
        answer.await.map_err(|_| ApiError::new(ErrorKind::Unavailable, "weft is stopping"))?
    }

    pub(crate) fn target_list(&self) -> Vec<weft_api::Target> {
        let targets = self.targets.list().into_iter();
        targets.map(|target| weft_api::Target { address: target.to_string() }).collect()
    }

    pub(crate) async fn ipam(&self) -> Result<Ipam, ApiError> {
        Ok(views::ipam(&self.snapshot().await?.ipam))
    }

    pub(crate) async fn dns_lookup(
        &self,
        request: DnsLookupRequest,
    ) -> Result<Vec<DnsRecord>, ApiError> {
        let peers = self.snapshot().await?.peers;
        let nickname = |peer| {
            let known = peers.iter().find(|known| known.peer == peer);
            known.map(|known| known.nickname.clone())
        };
        self.names.lookup(&self.control, &request, nickname).await
    }

    pub(crate) async fn detach(&self, request: DetachRequest) -> Result<Detached, ApiError> {
        self.attachments.detach(request).await
    }

    /// Dials more hosts, or these alone. Returns all targets.
    pub(crate) async fn connect(
        self: Arc<Self>,
        request: ConnectRequest,
    ) -> Result<Vec<weft_api::Target>, ApiError> {
        let wanted = parse_targets(&request.targets)?;
        self.look_up(&wanted).await?;
        let daemon = Arc::clone(&self);
        beside(move || {
            let dropped = daemon.change_targets(&wanted, request.replace)?;
            daemon.forget_all(&dropped);
            let _ = daemon.control.blocking_send(Request::TargetsChanged);
            Ok(())
        })
        .await?;
        Ok(self.target_list())
    }

    /// Stops dialling hosts, and forgets those that are gone. Returns the remaining targets.
    pub(crate) async fn forget(
        self: Arc<Self>,
        request: ForgetRequest,
    ) -> Result<Vec<weft_api::Target>, ApiError> {
        for text in &request.targets {
            self.forget_one(text).await?;
        }
        let _ = self.control.send(Request::TargetsChanged).await;
        Ok(self.target_list())
    }

    /// Ends the daemon.
    pub(crate) fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Saves the targets before they take effect.
    fn save_targets(&self, targets: &[Target]) -> Result<(), ApiError> {
        let texts: Vec<String> = targets.iter().map(ToString::to_string).collect();
        self.store
            .save(TARGETS_FILE, &texts)
            .map_err(|error| ApiError::new(ErrorKind::Unavailable, error))
    }

    fn forget_all<'a>(&self, targets: impl IntoIterator<Item = &'a Target>) {
        for target in targets {
            self.links.forget(target);
        }
    }

    /// Adds targets, or replaces all of them, entirely or not at all. Returns the removed targets.
    fn change_targets(&self, wanted: &[Target], replace: bool) -> Result<Vec<Target>, ApiError> {
        self.targets.change(|targets| {
            let kept = |target: &&Target| !replace || wanted.contains(target);
            let mut after: Vec<Target> = targets.iter().filter(kept).cloned().collect();
            for target in wanted {
                if !after.contains(target) {
                    after.push(target.clone());
                }
            }
            let new: Vec<&Target> = wanted.iter().filter(|it| !targets.contains(it)).collect();
            let dialled = match wanted.iter().all(|target| self.links.connect(target.clone())) {
                true => self.save_targets(&after),
                false => {
                    let text = "too many targets; forget some with weft forget HOST";
                    Err(ApiError::new(ErrorKind::Unavailable, text))
                }
            };
            if let Err(error) = dialled {
                self.forget_all(new);
                return Err(error);
            }
            let dropped = targets.iter().filter(|target| !after.contains(target)).cloned();
            let dropped = dropped.collect();
            Ok((after, dropped))
        })
    }
}

impl Daemon {
    /// Forgets hosts that are gone, and the target of this name. A target stays if it now leads to another
    /// host, for example to a reinstalled one whose old identity is forgotten.
    async fn forget_one(self: &Arc<Self>, text: &str) -> Result<(), ApiError> {
        let (reply, answer) = oneshot::channel();
        let _ = self.control.send(Request::Forget { text: text.to_owned(), reply }).await;
        let (gone, linked) =
            answer.await.map_err(|_| ApiError::new(ErrorKind::Unavailable, "weft is stopping"))?;
        let target = text.parse::<Target>();
        let leads_elsewhere = |target: &Target| {
            let lines = self.links.status();
            let line = lines.iter().find(|line| line.address == target.address());
            line.is_some_and(|line| {
                line.state == LinkState::Established
                    && line.peer.is_some_and(|peer| !gone.contains(&peer))
            })
        };
        if let Ok(target) = &target
            && (gone.is_empty() || !leads_elsewhere(target))
        {
            let (daemon, target) = (Arc::clone(self), target.clone());
            if beside(move || daemon.remove_target(&target)).await? {
                return Ok(());
            }
        }
        if !gone.is_empty() {
            return Ok(());
        }
        if linked {
            let text =
                format!("{text} is linked: weft forget takes only targets and hosts that are gone");
            return Err(ApiError::new(ErrorKind::Conflict, text));
        }
        let text = format!(
            "{text} is neither a target nor a host that is gone; weft status targets and weft status peers list them"
        );
        Err(ApiError::new(ErrorKind::NotFound, text))
    }

    /// Removes a target and stops dialling it. Returns false if it was none.
    fn remove_target(&self, target: &Target) -> Result<bool, ApiError> {
        let same = |known: &Target| (&known.host, known.port) == (&target.host, target.port);
        let found = self.targets.change(|targets| {
            let mut after = targets.to_vec();
            let found = targets.iter().position(same).map(|index| after.remove(index));
            if found.is_some() {
                self.save_targets(&after)?;
            }
            Ok::<_, ApiError>((after, found))
        })?;
        if let Some(found) = &found {
            self.links.forget(found);
        }
        Ok(found.is_some())
    }

    /// Rejects at once a name that cannot be resolved.
    async fn look_up(&self, targets: &[Target]) -> Result<(), ApiError> {
        for target in targets {
            self.links
                .look_up(target)
                .await
                .map_err(|reason| ApiError::new(ErrorKind::NotFound, reason))?;
        }
        Ok(())
    }
}

/// Carries out a change that waits for the disk, on a separate thread. It goes on to its end if the caller leaves.
async fn beside<T: Send + 'static>(
    change: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let changed = tokio::task::spawn_blocking(change).await;
    changed.map_err(|error| ApiError::new(ErrorKind::Internal, error))?
}

fn parse_targets(texts: &[String]) -> Result<Vec<Target>, ApiError> {
    let parse = |text: &String| {
        text.parse::<Target>().map_err(|error| ApiError::new(ErrorKind::BadRequest, error))
    };
    texts.iter().map(parse).collect()
}

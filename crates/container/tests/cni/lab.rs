//! A runtime's call of the plugin, against a daemon that does what a test wants.

use std::{
    io,
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use serde_json::{Value, json};
use tempfile::TempDir;
use weft_container::{
    cni::{
        Attach, Attached, Checked, Daemon, DaemonError, Detach, Dns, Environment, Host, Key,
        Listed, Outcome, Readiness, Request, Route, Tombstone, Tombstones, Version, execute,
    },
    identify,
};

pub(crate) const STARTED_NS: u64 = 1_000_000;
pub(crate) const BOOT: &str = "boot-1";

/// How the daemon behaves.
#[derive(Debug, Clone, Default)]
pub(crate) enum Mood {
    #[default]
    Works,
    /// Nothing listens.
    Down,
    /// It accepts, and never answers.
    Hangs,
    /// It was down for the first call, and works from the second on.
    ComesUp,
    /// It hangs in the first call, and dies in the second, which notices that late. Another one hangs too.
    Dies,
    Fails(DaemonError),
}

/// How the removal of an interface without the daemon ends.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Unlink {
    #[default]
    Works,
    Fails,
    Hangs,
}

/// A question that reached the daemon, or was on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    Attach(Box<Attach>),
    Detach(Detach),
    Check(Key),
    List,
    Status(String),
}

#[derive(Debug, Default)]
pub(crate) struct Fake {
    pub(crate) mood: Mood,
    pub(crate) attached: Attached,
    pub(crate) checked: Checked,
    pub(crate) listed: Vec<Listed>,
    pub(crate) readiness: Option<Readiness>,
    /// A detach of these containers fails.
    pub(crate) stuck: Vec<&'static str>,
    pub(crate) calls: Mutex<Vec<Call>>,
    pub(crate) count: AtomicUsize,
}

impl Fake {
    pub(crate) fn working() -> Self {
        let attached = attached();
        let addresses = attached.addresses.iter().map(|address| (*address, true)).collect();
        let checked = Checked { interface_is_whole: true, addresses };
        Self { attached, checked, ..Self::default() }
    }

    pub(crate) fn in_mood(mood: Mood) -> Self {
        Self { mood, ..Self::working() }
    }

    async fn answer<T>(&self, call: Call, answer: T) -> Result<T, DaemonError> {
        self.calls.lock().unwrap().push(call);
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let down = || Err(DaemonError::Unreachable("connection refused".into()));
        match &self.mood {
            Mood::Works => Ok(answer),
            Mood::Down => down(),
            Mood::ComesUp if count == 0 => down(),
            Mood::ComesUp => Ok(answer),
            Mood::Dies if count == 1 => {
                tokio::time::sleep(Duration::from_millis(900)).await;
                down()
            }
            Mood::Hangs | Mood::Dies => std::future::pending().await,
            Mood::Fails(error) => Err(error.clone()),
        }
    }
}

impl Daemon for Fake {
    async fn attach(&self, attach: &Attach) -> Result<Attached, DaemonError> {
        self.answer(Call::Attach(Box::new(attach.clone())), self.attached.clone()).await
    }

    async fn detach(&self, detach: &Detach) -> Result<(), DaemonError> {
        self.answer(Call::Detach(detach.clone()), ()).await?;
        match self.stuck.contains(&detach.target.container.as_str()) {
            true => Err(DaemonError::Interrupted("netlink says no".into())),
            false => Ok(()),
        }
    }

    async fn check(&self, key: &Key) -> Result<Checked, DaemonError> {
        self.answer(Call::Check(key.clone()), self.checked.clone()).await
    }

    async fn attachments(&self) -> Result<Vec<Listed>, DaemonError> {
        self.answer(Call::List, self.listed.clone()).await
    }

    async fn status(&self, network: &str) -> Result<Readiness, DaemonError> {
        let readiness = self.readiness.clone().unwrap_or(Readiness::Ready);
        self.answer(Call::Status(network.into()), readiness).await
    }
}

/// One end of a veth on the bridge, the other in the container.
pub(crate) fn attached() -> Attached {
    Attached {
        host_interface: Some(("vw1234".into(), "02:00:00:00:00:01".parse().unwrap())),
        mac: Some("02:00:00:00:00:02".parse().unwrap()),
        mtu: 1_388,
        addresses: vec!["10.32.0.5/12".parse().unwrap(), "fd00::5/64".parse().unwrap()],
        gateways: vec!["10.32.0.1".parse().unwrap()],
        routes: vec![Route::new("224.0.0.0/4".into(), None)],
        dns: Dns { nameservers: vec!["10.32.0.1".into()], ..Dns::default() },
    }
}

/// The traces of a call.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) outcome: Outcome,
    pub(crate) calls: Vec<Call>,
    /// Interfaces removed without the daemon.
    pub(crate) unlinked: Vec<(PathBuf, String)>,
    /// Whether each of them was noted for the daemon before.
    pub(crate) noted_first: bool,
    pub(crate) tombstones: Vec<Tombstone>,
    /// The container's namespace.
    pub(crate) namespace: PathBuf,
}

impl Run {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.outcome.stdout).unwrap()
    }

    pub(crate) fn attach(&self) -> &Attach {
        match self.calls.first() {
            Some(Call::Attach(attach)) => attach,
            other => panic!("no attach but {other:?}"),
        }
    }

    pub(crate) fn detached(&self) -> Vec<&Detach> {
        let mut detached = Vec::new();
        for call in &self.calls {
            if let Call::Detach(detach) = call {
                detached.push(detach);
            }
        }
        detached
    }
}

/// The namespaces of a host: files stand for them.
pub(crate) struct Machine {
    directory: TempDir,
    pub(crate) unlink: Unlink,
}

impl Machine {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("own"), "").unwrap();
        std::fs::write(directory.path().join("container"), "").unwrap();
        Self { directory, unlink: Unlink::Works }
    }

    pub(crate) fn namespace(&self) -> PathBuf {
        self.directory.path().join("container")
    }

    /// `@NS` in a variable stands for the container's namespace, `@OWN` for the host's.
    pub(crate) fn environment(&self, variables: &[(&str, &str)]) -> Environment {
        let at = |name: &str| self.directory.path().join(name).display().to_string();
        let places = [("@NS", at("container")), ("@OWN", at("own")), ("@GONE", at("gone"))];
        let value = |value: &str| {
            let place = places.iter().find(|(name, _)| *name == value);
            place.map_or(value.to_owned(), |(_, path)| path.clone())
        };
        Environment::of(variables.iter().map(|(name, given)| (*name, value(given))))
    }

    pub(crate) async fn run(&self, environment: &Environment, stdin: &[u8], fake: &Fake) -> Run {
        let (unlinked, noted_first) = (Mutex::new(Vec::new()), AtomicBool::new(true));
        let tombstones = Tombstones::of(self.directory.path());
        let unlink = async |namespace: &Path, interface: &str| {
            unlinked.lock().unwrap().push((namespace.to_owned(), interface.to_owned()));
            let is_noted = !tombstones.read(BOOT).unwrap().tombstones.is_empty();
            noted_first.fetch_and(is_noted, Ordering::Relaxed);
            match self.unlink {
                Unlink::Works => Ok(()),
                Unlink::Fails => Err(io::Error::other("netlink says no")),
                Unlink::Hangs => std::future::pending().await,
            }
        };
        let host = Host {
            daemon: fake,
            unlink,
            tombstones: tombstones.clone(),
            own_namespace: self.directory.path().join("own"),
            identify,
            started_ns: STARTED_NS,
            boot: BOOT.to_owned(),
        };
        let outcome = match Request::parse(environment, stdin) {
            Ok(request) => execute(request, &host).await,
            Err(rejected) => rejected.into(),
        };
        let found = tombstones.read(BOOT).unwrap();
        assert_eq!(found.notes, [""; 0]);
        Run {
            outcome,
            calls: std::mem::take(&mut *fake.calls.lock().unwrap()),
            unlinked: unlinked.into_inner().unwrap(),
            noted_first: noted_first.into_inner(),
            tombstones: found.tombstones.into_iter().map(|(_, tombstone)| tombstone).collect(),
            namespace: self.namespace(),
        }
    }
}

/// All variables that a runtime sets for a command.
pub(crate) fn variables(command: &'static str) -> Vec<(&'static str, &'static str)> {
    let attachment = [("CNI_CONTAINERID", "web-1"), ("CNI_NETNS", "@NS"), ("CNI_IFNAME", "eth0")];
    let mut variables = vec![("CNI_COMMAND", command), ("CNI_PATH", "/opt/cni/bin")];
    if matches!(command, "ADD" | "DEL" | "CHECK") {
        variables.extend(attachment);
    }
    variables
}

/// The smallest configuration.
pub(crate) fn config(version: Version) -> Value {
    json!({ "cniVersion": version.as_str(), "name": "shop", "type": "weft-cni" })
}

/// The result of a bridge plugin that ran before, in the form of a version.
pub(crate) fn previous(version: Version) -> Value {
    let mut address = json!({ "address": "192.0.2.7/24", "gateway": "192.0.2.1", "interface": 1 });
    if version < Version::V1_0_0 {
        address["version"] = "4".into();
    }
    json!({
        "cniVersion": version.as_str(),
        "interfaces": [
            { "name": "veth7", "mac": "02:00:00:00:07:01" },
            { "name": "net0", "mac": "02:00:00:00:07:02", "sandbox": "/run/netns/web" },
        ],
        "ips": [address],
        "routes": [{ "dst": "0.0.0.0/0", "gw": "192.0.2.1" }],
        "dns": { "nameservers": ["192.0.2.53"], "search": ["example.net"] },
    })
}

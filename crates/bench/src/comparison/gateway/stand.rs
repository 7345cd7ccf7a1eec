//! The two servers on one host, with the same certificates, and the clients of both.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity};

use super::super::others::write_secret;
use super::credentials::{self, FILES, SERVER_NAME};
use super::flood::SOURCES;
use crate::sandbox::{
    Host, Netns, Running, Sandbox, SandboxError, SandboxOptions, progress, wait_until,
};

/// Hosts: the server's, those of stock clients, and one for clients of this project's own.
const HOSTS: usize = STOCK + 2;
/// Stock clients of each server.
pub(super) const STOCK: usize = 4;
const STOCK_NAMES: [&str; STOCK] = ["stock1", "stock2", "stock3", "stock4"];
/// The name of `weft openvpn connect`.
const OWN_NAME: &str = "own";
const WEFT_PORT: u16 = 1_194;
const OPENVPN_PORT: u16 = 1_195;
/// Of OpenVPN's server inside, with its network: benchmark addresses (RFC 2544), in the sandbox's namespaces only.
const OPENVPN_INSIDE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
const OPENVPN_SERVER: &str = "server 198.18.0.0 255.255.0.0";
/// The MTU that Weft's gateway tells its clients, in bytes; OpenVPN's server gets the same.
const MTU_BYTES: u32 = 1_416;
/// What OpenVPN runs with at either end, where nothing else is said: as in the table of systems.
const TUNED: &str = "dev-type tun\ndisable-dco\nfast-io\ndata-ciphers AES-256-GCM\nsndbuf 4194304\n\
                     rcvbuf 4194304\ntxqueuelen 2000\nverb 1\n";
/// Limit of a server's start, and of a client's connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(30);
const CONNECTED: &str = "Initialization Sequence Completed";
/// The unit of `/proc/PID/stat`: USER_HZ, which Linux fixes at 100 for user space.
const TICKS_PER_SECOND: f64 = 100.0;

/// Which server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum System {
    Weft,
    OpenVpn,
}

impl System {
    pub(super) const BOTH: [Self; 2] = [Self::OpenVpn, Self::Weft];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Weft => "weft",
            Self::OpenVpn => "openvpn",
        }
    }
}

/// Both servers on one host.
pub(super) struct Servers {
    pub(super) sandbox: Sandbox,
    pub(super) files: PathBuf,
    weft_inside: IpAddr,
    openvpn: Running,
}

impl Servers {
    /// Starts both servers, with certificates for this many clients of the generator.
    ///
    /// # Errors
    /// Returns an error if a server does not start.
    pub(super) fn start(crowd: usize) -> Result<Self, SandboxError> {
        progress::step("making hosts, and starting both servers on the first");
        let sandbox = Sandbox::new(&SandboxOptions { hosts: HOSTS, ..SandboxOptions::default() })?;
        let host = sandbox.host(0);
        sandbox.launch(host, &["--engine", "userspace"])?;
        host.weft(&["ca", "init"])?.success()?;
        let place = SocketAddr::from((host.ipv4(), WEFT_PORT)).to_string();
        let served = host.weft_json(&["openvpn", "serve", "--remote", &place])?;
        let inside = served["addresses"][0].as_str().and_then(|net| net.split('/').next());
        let weft_inside = inside.and_then(|address| address.parse().ok()).ok_or_else(|| {
            let why = format!("no address: {served}");
            SandboxError::UnexpectedOutput { command: "weft openvpn serve".to_owned(), why }
        })?;
        let files = sandbox.directory().join("vpn");
        fs::create_dir_all(&files).map_err(SandboxError::io("make a directory"))?;
        let authority = host.state_directory().join("openvpn-authority.json");
        let named = [&STOCK_NAMES[..], &[OWN_NAME]].concat();
        credentials::write_all(&authority, &files, &named, crowd)?;
        let openvpn = start_openvpn(host, &files)?;
        route_forged_sources(&sandbox)?;
        Ok(Self { sandbox, files, weft_inside, openvpn })
    }

    pub(super) fn host(&self) -> &Host {
        self.sandbox.host(0)
    }

    /// Where the generator runs.
    pub(super) fn far(&self) -> &Netns {
        self.sandbox.host(HOSTS - 1).netns()
    }

    /// The place that clients connect to.
    pub(super) fn outside(&self, system: System) -> SocketAddr {
        let port = if system == System::Weft { WEFT_PORT } else { OPENVPN_PORT };
        SocketAddr::from((self.host().ipv4(), port))
    }

    /// The server's address in its network.
    pub(super) const fn inside(&self, system: System) -> IpAddr {
        match system {
            System::Weft => self.weft_inside,
            System::OpenVpn => IpAddr::V4(OPENVPN_INSIDE),
        }
    }

    /// The server's process.
    pub(super) fn pid(&self, system: System) -> u32 {
        match system {
            System::Weft => self.host().daemon_pid().unwrap_or_default(),
            System::OpenVpn => self.openvpn.pid(),
        }
    }
}

/// The way to the sources of a flood, as from the Internet: by the host that floods.
fn route_forged_sources(sandbox: &Sandbox) -> Result<(), SandboxError> {
    let (network, bits) = SOURCES;
    let far = sandbox.host(HOSTS - 1);
    far.netns().ip(&format!("route add local {network}/{bits} dev lo"))?;
    let route = format!("route add {network}/{bits} via {}", far.ipv4());
    sandbox.host(0).netns().ip(&route)?;
    Ok(())
}

fn start_openvpn(host: &Host, files: &Path) -> Result<Running, SandboxError> {
    let path = |name: &str| files.join(name).display().to_string();
    let text = format!(
        "{TUNED}dev bench\nproto udp4\nlocal {}\nport {OPENVPN_PORT}\nmode server\ntls-server\ndh none\n\
         topology subnet\n{OPENVPN_SERVER}\nkeepalive 10 60\nmax-clients 16384\n\
         tls-version-min 1.3\ntun-mtu {MTU_BYTES}\nca {}\ncert {}\nkey {}\ntls-crypt-v2 {}\n",
        host.ipv4(),
        path(FILES.authority),
        path(FILES.server),
        path(FILES.server_key),
        path(FILES.server_v2),
    );
    let config = files.join("server.conf");
    write_secret(&config, &text)?;
    start_logged(host.netns(), &config, &files.join("server.log"))
}

/// Starts OpenVPN and waits until it is up.
fn start_logged(netns: &Netns, config: &Path, log: &Path) -> Result<Running, SandboxError> {
    let file = fs::File::create(log).map_err(SandboxError::io("make a log"))?;
    let running = netns.spawn_logged(&["openvpn", "--config", &config.to_string_lossy()], &file)?;
    let text = || fs::read_to_string(log).unwrap_or_default();
    let up = wait_until("OpenVPN to be up", CONNECT_LIMIT, || text().contains(CONNECTED));
    if let Err(error) = up {
        progress::note(&crate::sandbox::last_lines(&text(), 6));
        return Err(error);
    }
    Ok(running)
}

/// The clients that carry traffic. All are connected all the time.
pub(super) struct Clients {
    _running: Vec<Running>,
}

impl Clients {
    /// Connects four stock clients to each server, each from a separate host, and this project's own to Weft's.
    ///
    /// # Errors
    /// Returns an error if a client does not connect.
    pub(super) fn start(servers: &Servers) -> Result<Self, SandboxError> {
        progress::step("connecting the clients");
        let mut running = Vec::new();
        for (index, name) in STOCK_NAMES.into_iter().enumerate() {
            for system in System::BOTH {
                let file = profile(servers, system, name, TUNED)?;
                let log = file.with_extension("log");
                running.push(start_logged(stock(servers, index), &file, &log)?);
            }
        }
        let file = profile(servers, System::Weft, OWN_NAME, "")?;
        let words = ["openvpn", "connect", &file.to_string_lossy(), "--json"];
        let mut own = servers.sandbox.host(HOSTS - 1).spawn_weft(&words)?;
        own.line_with(r#""event":"connected""#, CONNECT_LIMIT)?;
        running.push(own);
        Ok(Self { _running: running })
    }
}

/// The namespace of a stock client.
pub(super) fn stock(servers: &Servers, index: usize) -> &Netns {
    servers.sandbox.host(index + 1).netns()
}

/// Writes a client's profile and returns its file.
fn profile(
    servers: &Servers,
    system: System,
    name: &str,
    more: &str,
) -> Result<PathBuf, SandboxError> {
    let path = |name: &str| servers.files.join(name).display().to_string();
    let outside = servers.outside(system);
    let text = format!(
        "client\n{more}dev v{}\ndev-type tun\nproto udp4\nnobind\nremote {} {}\nremote-cert-tls server\n\
         verify-x509-name {SERVER_NAME} name\nca {}\ncert {}\nkey {}\ntls-crypt-v2 {}\n",
        system.name(),
        outside.ip(),
        outside.port(),
        path(FILES.authority),
        path(&credentials::certificate_file(name)),
        path(FILES.client_key),
        path(FILES.client_v2),
    );
    let file = servers.files.join(format!("{name}-{}.ovpn", system.name()));
    write_secret(&file, &text)?;
    Ok(file)
}

/// Processor time that a process has used, in seconds, with that of its children that have ended.
///
/// # Errors
/// Returns an error if the process is gone.
pub(super) fn busy_seconds(pid: u32) -> Result<f64, SandboxError> {
    let file = format!("/proc/{pid}/stat");
    let text = fs::read_to_string(&file).map_err(SandboxError::io(format!("read {file}")))?;
    parse_busy(&text).ok_or_else(|| SandboxError::UnexpectedOutput {
        command: file,
        why: "no processor time".to_owned(),
    })
}

/// The sum of the fields utime, stime, cutime and cstime (proc_pid_stat(5)).
fn parse_busy(stat: &str) -> Option<f64> {
    // The name before may have spaces.
    let (_, fields) = stat.rsplit_once(')')?;
    let ticks = fields.split_whitespace().skip(11).take(4);
    let ticks: Vec<f64> = ticks.map(str::parse).collect::<Result<_, _>>().ok()?;
    (ticks.len() == 4).then(|| ticks.iter().sum::<f64>() / TICKS_PER_SECOND)
}

/// Keeps all threads of a process to one core; `None`: to none in particular. Threads that it starts later follow.
///
/// # Errors
/// Returns an error if the process is gone or the system refuses.
pub(super) fn pin(pid: u32, core: Option<usize>) -> Result<(), SandboxError> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut set = CpuSet::new();
    match core {
        Some(core) => set.set(core),
        None => (0..cores).for_each(|core| set.set(core)),
    }
    let folder = format!("/proc/{pid}/task");
    let failed = SandboxError::io(format!("pin the threads of process {pid}"));
    let threads = fs::read_dir(&folder).map_err(SandboxError::io(format!("read {folder}")))?;
    let numbers = threads.flatten().filter_map(|it| it.file_name().to_str()?.parse::<i32>().ok());
    let done = numbers.filter_map(rustix::process::Pid::from_raw).try_for_each(|thread| {
        match sched_setaffinity(Some(thread), &set) {
            // It has ended meanwhile.
            Err(rustix::io::Errno::SRCH) => Ok(()),
            done => done,
        }
    });
    done.map_err(|error| failed(error.into()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn processor_time_counts_children_and_a_name_may_have_spaces() {
        let stat = "7 (a (b) c) S 1 7 7 0 -1 4194560 1 2 3 4 150 50 30 20 20 0 9 0";
        assert_eq!(parse_busy(stat), Some(2.5));
        assert_eq!(parse_busy("7 (a) S 1 7"), None);
        assert!(busy_seconds(std::process::id()).is_ok());
    }
}

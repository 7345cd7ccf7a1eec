//! References in every form, against named namespaces, processes and a server that answers like
//! Docker's. Needs root, since it creates network namespaces in separate processes, and util-linux's
//! `unshare`.
#![allow(clippy::unwrap_used)]

use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixListener,
    task::JoinHandle,
};
use weft_container::{
    ContainerError, DOCKER_ANSWER_BYTES_MAX, DockerFailure, ResolveOptions, Sandbox, SandboxKind,
    is_alive, resolve,
};

const ID: &str = "3f4e1c2d9a8b7766554433221100ffeeddccbbaa99887766554433221100abcd";

/// A process in a separate network namespace; killed when dropped.
struct Process(Child);

impl Process {
    fn start() -> Self {
        let child = Command::new("unshare")
            .args(["--net", "sleep", "600"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("this test needs util-linux's unshare");
        let process = Self(child);
        let own = inode(Path::new("/proc/self/ns/net"));
        let deadline = Instant::now() + Duration::from_secs(20);
        while inode(&process.namespace()) == own {
            assert!(Instant::now() < deadline, "no new namespace: this test must run as root");
            std::thread::sleep(Duration::from_millis(5));
        }
        process
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn namespace(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.pid()).into()
    }

    fn end(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn inode(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().map(|metadata| metadata.ino())
}

/// An engine on a unix socket that answers each request with the reply that `answer` gives for its
/// path.
struct Engine {
    directory: tempfile::TempDir,
    task: JoinHandle<()>,
}

impl Engine {
    fn start(answer: impl Fn(&str) -> Vec<u8> + Send + 'static) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("docker.sock")).unwrap();
        let task = tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut request = Vec::new();
                while !request.ends_with(b"\r\n\r\n") {
                    let mut byte = [0];
                    if stream.read(&mut byte).await.unwrap_or(0) == 0 {
                        break;
                    }
                    request.push(byte[0]);
                }
                let text = String::from_utf8(request).unwrap();
                let path = text.split(' ').nth(1).unwrap_or_default().to_owned();
                // The client may have hung up on an answer that is too long.
                let _ = stream.write_all(&answer(&path)).await;
                let _ = stream.shutdown().await;
            }
        });
        Self { directory, task }
    }

    /// An engine with one container in the shape of Docker 27's answer.
    fn with_container(pid: u32, status: &str, network_mode: &str) -> Self {
        let running = status == "running" || status == "paused";
        let body = format!(
            r#"{{"Id":"{ID}","Created":"2026-11-01T10:00:00.000000000Z","Path":"sleep","Args":["600"],
            "State":{{"Status":"{status}","Running":{running},"Paused":false,"Restarting":false,
            "OOMKilled":false,"Dead":false,"Pid":{pid},"ExitCode":0,"Error":"",
            "StartedAt":"2026-11-01T10:00:01Z","FinishedAt":"0001-01-01T00:00:00Z"}},
            "Image":"sha256:00","Name":"/web","RestartCount":0,"Driver":"overlay2",
            "HostConfig":{{"NetworkMode":"{network_mode}","Privileged":false,"Dns":[]}},
            "Config":{{"Hostname":"web","Env":["PATH=/bin"]}},
            "NetworkSettings":{{"SandboxID":"77","SandboxKey":"/var/run/docker/netns/77","Ports":{{}},
            "Networks":{{"bridge":{{"IPAddress":"172.17.0.2","MacAddress":"02:42:ac:11:00:02"}}}}}}}}"#
        );
        Self::start(move |path| {
            let short = format!("/containers/{}/json", &ID[..12]);
            let full = format!("/containers/{ID}/json");
            if path == "/containers/web/json" || path == short || path == full {
                reply("200 OK", &body)
            } else {
                reply("404 Not Found", r#"{"message":"No such container: that one"}"#)
            }
        })
    }

    fn options(&self) -> ResolveOptions {
        let netns_dir = self.directory.path().join("netns");
        std::fs::create_dir_all(&netns_dir).unwrap();
        let docker_socket = self.directory.path().join("docker.sock");
        ResolveOptions { docker_socket, netns_dir, ..ResolveOptions::default() }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn reply(status: &str, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status}\r\nApi-Version: 1.47\r\nContent-Type: application/json\r\n\
         Server: Docker/27.3.1 (linux)\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// A directory with a namespace name, as `ip netns add` makes it. It is a symbolic link, so no mount
/// has to be undone.
fn name_namespace(options: &ResolveOptions, name: &str, process: &Process) {
    std::os::unix::fs::symlink(process.namespace(), options.netns_dir.join(name)).unwrap();
}

fn no_engine() -> (tempfile::TempDir, ResolveOptions) {
    let directory = tempfile::tempdir().unwrap();
    let netns_dir = directory.path().join("netns");
    std::fs::create_dir_all(&netns_dir).unwrap();
    let docker_socket = directory.path().join("docker.sock");
    let options = ResolveOptions { docker_socket, netns_dir, ..ResolveOptions::default() };
    (directory, options)
}

async fn refused(reference: &str, options: &ResolveOptions) -> (ContainerError, String) {
    let error = resolve(reference, options).await.unwrap_err();
    let text = error.to_string();
    (error, text)
}

#[tokio::test]
async fn a_docker_container_is_found_by_name_and_by_id() {
    let process = Process::start();
    let engine = Engine::with_container(process.pid(), "running", "bridge");
    let options = engine.options();
    let mut found = Vec::new();
    for reference in ["web", &ID[..12], ID, "docker:web"] {
        found.push(resolve(reference, &options).await.unwrap());
    }
    let Sandbox { id, name, namespace, kind, pid, inode: number, .. } = found[0].clone();
    assert_eq!(id, format!("docker:{ID}"));
    assert_eq!((name.as_str(), kind), ("web", SandboxKind::Docker));
    assert_eq!((pid, namespace), (Some(process.pid()), process.namespace()));
    assert_eq!(Some(number), inode(&process.namespace()));
    assert!(found.iter().all(|sandbox| *sandbox == found[0]));
    // Its engine's own name for the namespace, and the kernel's, each tell that it is the same.
    let key = "/var/run/docker/netns/77".to_owned();
    assert_eq!(found[0].engine_key, Some(key));
    let by_pid = resolve(&format!("pid:{}", process.pid()), &options).await.unwrap();
    let named = Sandbox { device: 0, inode: 0, ..found[0].clone() };
    assert!(found[0].is_same_namespace(&by_pid) && found[0].is_same_namespace(&named));
    let nowhere = Sandbox { engine_key: None, ..named.clone() };
    assert!(!nowhere.is_same_namespace(&nowhere) && !named.is_same_namespace(&by_pid));
    assert_eq!(resolve(&id, &options).await.unwrap(), found[0], "a key can be resolved again");
}

#[tokio::test]
async fn a_named_namespace_comes_before_docker() {
    let (named, contained) = (Process::start(), Process::start());
    let engine = Engine::with_container(contained.pid(), "running", "bridge");
    let options = engine.options();
    name_namespace(&options, "web", &named);
    let sandbox = resolve("web", &options).await.unwrap();
    assert_eq!((sandbox.id.as_str(), sandbox.kind), ("netns:web", SandboxKind::Netns));
    assert_eq!(sandbox.namespace, options.netns_dir.join("web"));
    assert_eq!(Some(sandbox.inode), inode(&named.namespace()));
    let other = resolve("docker:web", &options).await.unwrap();
    assert_eq!(other.pid, Some(contained.pid()));
}

#[tokio::test]
async fn name_and_path_of_a_named_namespace_give_one_key() {
    let process = Process::start();
    let (_directory, options) = no_engine();
    name_namespace(&options, "blue", &process);
    let by_name = resolve("blue", &options).await.unwrap();
    let path = options.netns_dir.join("blue");
    assert_eq!(resolve(path.to_str().unwrap(), &options).await.unwrap(), by_name);
    assert_eq!(resolve("netns:blue", &options).await.unwrap(), by_name);
}

#[tokio::test]
async fn processes_and_paths_lead_to_their_namespace_until_it_ends() {
    let mut process = Process::start();
    let (_directory, options) = no_engine();
    let by_pid = resolve(&format!("pid:{}", process.pid()), &options).await.unwrap();
    let by_path = resolve(process.namespace().to_str().unwrap(), &options).await.unwrap();
    assert_eq!((by_pid.kind, by_path.kind), (SandboxKind::Pid, SandboxKind::Path));
    assert_eq!(by_path.id, format!("path:{}", process.namespace().display()));
    assert_eq!(by_pid.inode, by_path.inode);
    assert_eq!(resolve(&by_path.id, &options).await.unwrap(), by_path);
    assert!(is_alive(&by_pid, options.identify) && is_alive(&by_path, options.identify));

    let mistaken = Sandbox { pid_start: by_pid.pid_start.map(|start| start - 1), ..by_pid.clone() };
    assert!(
        !is_alive(&mistaken, options.identify),
        "another process with the same number is not the same sandbox"
    );
    process.end();
    assert!(!is_alive(&by_pid, options.identify) && !is_alive(&by_path, options.identify));
    let (error, _) = refused(&by_pid.id, &options).await;
    assert!(matches!(error, ContainerError::NoProcess { .. }), "{error:?}");
}

#[tokio::test]
async fn a_replaced_namespace_is_noticed() {
    let (first, second) = (Process::start(), Process::start());
    let (_directory, options) = no_engine();
    name_namespace(&options, "blue", &first);
    let before = resolve("blue", &options).await.unwrap();
    assert!(is_alive(&before, options.identify));
    std::fs::remove_file(options.netns_dir.join("blue")).unwrap();
    assert!(!is_alive(&before, options.identify));
    name_namespace(&options, "blue", &second);
    assert!(!is_alive(&before, options.identify));
    assert_ne!(resolve("blue", &options).await.unwrap().inode, before.inode);
}

#[tokio::test]
async fn a_stopped_container_is_named_as_such() {
    let engine = Engine::with_container(0, "exited", "bridge");
    let (error, text) = refused("web", &engine.options()).await;
    assert!(matches!(error, ContainerError::NotRunning { .. }), "{error:?}");
    assert!(text.contains("web is exited") && text.contains("docker start web"), "{text}");
}

#[tokio::test]
async fn the_hosts_own_network_is_refused() {
    let process = Process::start();
    let engine = Engine::with_container(process.pid(), "running", "host");
    let by_mode = refused("web", &engine.options()).await.0;
    let own = std::process::id();
    let engine = Engine::with_container(own, "running", "bridge");
    let by_namespace = refused("web", &engine.options()).await.0;
    let by_pid = refused(&format!("pid:{own}"), &engine.options()).await.0;
    let by_path = refused("/proc/self/ns/net", &engine.options()).await.0;
    for error in [by_mode, by_namespace, by_pid, by_path] {
        assert!(matches!(error, ContainerError::HostNetwork { .. }), "{error:?}");
    }
}

#[tokio::test]
async fn an_unknown_container_is_reported_as_such() {
    let engine = Engine::with_container(1, "running", "bridge");
    let (_, text) = refused("nosuch", &engine.options()).await;
    assert!(text.contains("netns/nosuch") && text.contains("Docker has no container"), "{text}");
    let (_directory, options) = no_engine();
    let (error, text) = refused("nosuch", &options).await;
    let unreachable =
        matches!(error, ContainerError::NotFound { docker: DockerFailure::Unreachable { .. }, .. });
    assert!(unreachable, "{error:?}");
    assert!(text.contains("no Docker engine answers at"), "{text}");
    let (error, _) = refused("netns:nosuch", &options).await;
    assert!(matches!(error, ContainerError::NoSuchNamespace { .. }), "{error:?}");
}

#[tokio::test]
async fn an_unreachable_engine_does_not_matter_for_a_named_namespace() {
    let process = Process::start();
    let (_directory, options) = no_engine();
    name_namespace(&options, "blue", &process);
    assert!(resolve("blue", &options).await.is_ok());
}

#[tokio::test]
async fn senseless_references_are_refused() {
    let (_directory, options) = no_engine();
    for reference in ["", ".", "..", "pid:x", "pid:0", "pid:-1", "docker:", "netns:a/b"] {
        let (error, _) = refused(reference, &options).await;
        assert!(matches!(error, ContainerError::Invalid { .. }), "{reference}: {error:?}");
    }
    // Names that Docker could not have are never sent to it.
    for reference in ["a b", "x?force=1", "docker:../../info", "ä"] {
        let (error, text) = refused(reference, &options).await;
        assert!(text.contains("cannot be the name of a Docker container"), "{error:?}");
    }
}

#[tokio::test]
async fn files_that_are_no_namespace_are_refused() {
    let (directory, options) = no_engine();
    let plain = directory.path().join("plain");
    std::fs::write(&plain, "").unwrap();
    // The remains of `ip netns` after a reboot: a name without a namespace behind it.
    std::fs::write(options.netns_dir.join("stale"), "").unwrap();
    for reference in [plain.to_str().unwrap(), "stale", "/dev/null"] {
        let (error, _) = refused(reference, &options).await;
        assert!(matches!(error, ContainerError::NotANamespace { .. }), "{reference}: {error:?}");
    }
    let (error, _) = refused("/nonexistent/ns", &options).await;
    assert!(matches!(error, ContainerError::Unreadable { .. }), "{error:?}");
}

#[tokio::test]
async fn the_engines_errors_are_passed_on() {
    let message = r#"{"message":"multiple IDs found with provided prefix: 3f"}"#;
    let engine = Engine::start(move |_| reply("400 Bad Request", message));
    let (error, text) = refused("3f", &engine.options()).await;
    assert!(matches!(error, ContainerError::NotFound { .. }), "{error:?}");
    assert!(text.contains("multiple IDs found") && text.contains("400"), "{text}");
}

#[tokio::test]
async fn answers_that_are_not_dockers_are_refused() {
    let huge = format!(r#"{{"Id":"{}"}}"#, "a".repeat(DOCKER_ANSWER_BYTES_MAX));
    let bad_id = r#"{"Id":"../../etc","Name":"/web","State":{"Running":true,"Pid":1}}"#;
    let answers: [Vec<u8>; 6] = [
        reply("200 OK", &huge),
        reply("200 OK", bad_id),
        reply("200 OK", "[]"),
        reply("200 OK", ""),
        b"SSH-2.0-OpenSSH_9.2\r\n".to_vec(),
        Vec::new(),
    ];
    for answer in answers {
        let start = String::from_utf8_lossy(&answer[..answer.len().min(80)]).into_owned();
        let engine = Engine::start(move |_| answer.clone());
        let (error, _) = refused("docker:web", &engine.options()).await;
        let unreadable = matches!(
            error,
            ContainerError::Docker { docker: DockerFailure::Unreadable { .. }, .. }
        );
        assert!(unreadable, "{start}: {error:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_does_not_answer_is_given_up() {
    let directory = tempfile::tempdir().unwrap();
    let docker_socket = directory.path().join("docker.sock");
    let _listener = UnixListener::bind(&docker_socket).unwrap();
    let netns_dir = directory.path().to_owned();
    let options = ResolveOptions { docker_socket, netns_dir, ..ResolveOptions::default() };
    let (error, _) = refused("docker:web", &options).await;
    let timed_out =
        matches!(error, ContainerError::Docker { docker: DockerFailure::TimedOut { .. }, .. });
    assert!(timed_out, "{error:?}");
}

#![allow(clippy::unwrap_used)]

use std::{collections::BTreeSet, os::unix::fs::symlink};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    super::daemon::{Attach, Attached, Checked, Detach, Key, Listed},
    *,
};

/// Says whether it is ready; nothing else is asked.
struct Status(Result<Readiness, DaemonError>);

impl Daemon for Status {
    async fn attach(&self, _: &Attach) -> Result<Attached, DaemonError> {
        unreachable!("setup attaches nothing")
    }

    async fn detach(&self, _: &Detach) -> Result<(), DaemonError> {
        unreachable!("setup detaches nothing")
    }

    async fn check(&self, _: &Key) -> Result<Checked, DaemonError> {
        unreachable!("setup checks nothing")
    }

    async fn attachments(&self) -> Result<Vec<Listed>, DaemonError> {
        unreachable!("setup lists nothing")
    }

    async fn status(&self, _: &str) -> Result<Readiness, DaemonError> {
        self.0.clone()
    }
}

const READY: Status = Status(Ok(Readiness::Ready));
const ALL: &str = r#""0.1.0","0.2.0","0.3.0","0.3.1","0.4.0","1.0.0","1.1.0""#;
const OLD: &str = r#""0.3.0","0.3.1","0.4.0","1.0.0""#;

/// The directories of a host without plugins.
struct Machine {
    directory: TempDir,
    options: Options,
}

impl Machine {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("weft"), vec![b'w'; 100_000]).unwrap();
        fs::create_dir(at("debian")).unwrap();
        let options = Options {
            config_dir: at("etc/cni/net.d"),
            bin_dir: at("opt/cni/bin"),
            chained_dirs: vec![at("debian")],
            ..Options::of_program(at("weft"))
        };
        Self { directory, options }
    }

    fn script(&self, directory: &Path, name: &str, script: &str) -> PathBuf {
        fs::create_dir_all(directory).unwrap();
        let path = directory.join(name);
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// A plugin where runtimes look.
    fn plugin(&self, name: &str, versions: &str) {
        self.script(&self.options.bin_dir, name, &version_script(versions));
    }

    async fn install(&self) -> Report {
        install(&self.options, &READY).await.unwrap()
    }

    fn conflist(&self) -> Value {
        serde_json::from_slice(&fs::read(self.options.conflist()).unwrap()).unwrap()
    }

    fn types(&self) -> Vec<String> {
        let list = self.conflist();
        let plugins = list["plugins"].as_array().unwrap().iter();
        plugins.map(|plugin| plugin["type"].as_str().unwrap().to_owned()).collect()
    }

    /// All files below the directory.
    fn files(&self) -> BTreeSet<PathBuf> {
        let (mut files, mut open) = (BTreeSet::new(), vec![self.directory.path().to_owned()]);
        while let Some(directory) = open.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if fs::symlink_metadata(&path).unwrap().is_dir() {
                    open.push(path);
                } else {
                    files.insert(path);
                }
            }
        }
        files
    }
}

fn version_script(versions: &str) -> String {
    format!(
        "cat >/dev/null\n[ \"$CNI_COMMAND\" = VERSION ] && echo '{{\"cniVersion\":\"1.0.0\",\"supportedVersions\":[{versions}]}}'"
    )
}

#[tokio::test]
async fn binary_and_configuration_are_installed_once_the_daemon_is_ready() {
    let machine = Machine::new();
    machine.plugin("portmap", ALL);
    machine.plugin("bandwidth", ALL);
    let report = machine.install().await;
    let options = &machine.options;
    assert_eq!(report.changed, [options.plugin(), options.conflist()]);
    assert_eq!(report.versions, Version::ALL);
    assert_eq!(report.chained, ["portmap", "bandwidth"]);
    assert!(matches!(&report.notes[..], [one] if one.contains("--masquerade")), "{report:?}");
    assert_eq!(fs::read(options.plugin()).unwrap(), fs::read(&options.program).unwrap());
    assert_eq!(fs::metadata(options.plugin()).unwrap().permissions().mode() & 0o7777, 0o755);
    assert_eq!(
        machine.conflist(),
        json!({
            "cniVersion": "1.0.0",
            "cniVersions": ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"],
            "disableCheck": true,
            "name": "weft",
            "plugins": [
                {
                    "type": "weft-cni",
                    "capabilities": { "aliases": true, "dns": true, "ips": true, "mac": true },
                },
                { "type": "portmap", "capabilities": { "portMappings": true }, "snat": true },
                { "type": "bandwidth", "capabilities": { "bandwidth": true } },
            ],
        })
    );
}

#[tokio::test]
async fn nothing_is_written_while_the_daemon_is_not_ready() {
    let down = DaemonError::Unreachable("connection refused".into());
    let unready = Readiness::Unready("no address range yet".into());
    for (answer, why) in [(Err(down), "connection refused"), (Ok(unready), "no address range yet")]
    {
        let machine = Machine::new();
        let before = machine.files();
        let error = install(&machine.options, &Status(answer)).await.unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(machine.files(), before);
    }
}

#[tokio::test]
async fn a_second_run_changes_nothing_and_a_third_repairs() {
    let machine = Machine::new();
    machine.plugin("portmap", ALL);
    machine.install().await;
    assert!(machine.install().await.changed.is_empty());
    let options = &machine.options;
    fs::write(options.plugin(), vec![b'x'; 100_000]).unwrap();
    assert_eq!(machine.install().await.changed, [options.plugin()]);
    fs::set_permissions(options.plugin(), fs::Permissions::from_mode(0o700)).unwrap();
    assert_eq!(machine.install().await.changed, [options.plugin()]);
    fs::write(options.conflist(), "{").unwrap();
    assert_eq!(machine.install().await.changed, [options.conflist()]);
}

#[tokio::test]
async fn one_old_plugin_lowers_the_versions_of_the_list() {
    let machine = Machine::new();
    machine.plugin("portmap", OLD);
    machine.plugin("bandwidth", ALL);
    let report = machine.install().await;
    assert_eq!(report.versions, Version::ALL[..4]);
    let note = "older than 1.6.0 lack it: portmap";
    assert!(report.notes.iter().any(|one| one.contains(note)), "{:?}", report.notes);
    assert_eq!(machine.conflist()["cniVersions"], json!(["0.3.0", "0.3.1", "0.4.0", "1.0.0"]));
    assert_eq!(machine.conflist()["cniVersion"], "1.0.0");
    machine.plugin("portmap", r#""0.3.1","0.4.0""#);
    machine.install().await;
    assert_eq!(machine.conflist()["cniVersions"], json!(["0.3.1", "0.4.0"]));
    assert_eq!(machine.conflist()["cniVersion"], "0.4.0");
}

#[tokio::test]
async fn missing_plugins_are_left_out() {
    let machine = Machine::new();
    let report = machine.install().await;
    assert_eq!(machine.types(), ["weft-cni"]);
    assert!(machine.conflist().get("disableCheck").is_none());
    assert_eq!(report.versions, Version::ALL);
    assert_eq!(report.notes.len(), 2, "{:?}", report.notes);
    assert!(report.notes[0].starts_with("left out portmap"), "{:?}", report.notes);
}

#[tokio::test]
async fn plugins_that_do_not_answer_version_are_left_out() {
    let huge = format!("exec head -c {} /dev/zero", 8 * VERSION_ANSWER_BYTES_MAX);
    let cases = [
        ("exit 3", "exit status: 3"),
        ("echo nonsense", "malformed"),
        ("echo null", "malformed"),
        (r#"echo '{"supportedVersions":null}'"#, "malformed"),
        (r#"echo '{"supportedVersions":[1]}'"#, "malformed"),
        (r#"echo '{"supportedVersions":[]}'"#, "speaks no version"),
        (r#"echo '{"supportedVersions":["0.2.0"]}'"#, "speaks no version"),
        (huge.as_str(), "65536 bytes"),
    ];
    for (script, why) in cases {
        let machine = Machine::new();
        machine.script(&machine.options.bin_dir, "portmap", script);
        let report = machine.install().await;
        assert_eq!(machine.types(), ["weft-cni"], "{script}");
        assert!(report.notes[0].contains(why), "{script}: {:?}", report.notes);
    }
    let machine = Machine::new();
    let path = machine.script(&machine.options.bin_dir, "portmap", "true");
    fs::set_permissions(path, fs::Permissions::from_mode(0o644)).unwrap();
    assert!(machine.install().await.notes[0].contains("VERSION failed"));
}

#[tokio::test(start_paused = true)]
async fn a_plugin_that_hangs_is_left_out() {
    let machine = Machine::new();
    machine.script(&machine.options.bin_dir, "portmap", "exec sleep 600");
    let report = machine.install().await;
    assert!(report.notes[0].contains("within 5000 ms"), "{:?}", report.notes);
}

#[tokio::test]
async fn plugins_that_do_not_agree_are_not_both_in_the_list() {
    let machine = Machine::new();
    machine.plugin("portmap", r#""0.4.0""#);
    machine.plugin("bandwidth", r#""1.0.0""#);
    let report = machine.install().await;
    assert_eq!(report.chained, ["portmap"]);
    assert!(report.notes.iter().any(|note| note.contains("bandwidth: it speaks no version")));
}

#[tokio::test]
async fn a_plugin_in_debians_directory_is_linked_to_where_runtimes_look() {
    let machine = Machine::new();
    let debian = machine.options.chained_dirs[0].clone();
    let found = machine.script(&debian, "portmap", &version_script(OLD));
    let link = machine.options.bin_dir.join("portmap");
    let report = machine.install().await;
    assert_eq!(report.chained, ["portmap"]);
    assert_eq!(fs::read_link(&link).unwrap(), found);
    assert!(machine.install().await.changed.is_empty());
    // A link that leads nowhere is replaced.
    fs::remove_file(&link).unwrap();
    symlink("/nowhere/portmap", &link).unwrap();
    assert_eq!(machine.install().await.changed, std::slice::from_ref(&link));
    assert_eq!(fs::read_link(&link).unwrap(), found);
}

#[tokio::test]
async fn network_and_runtime_directory_are_written_if_they_are_not_the_usual_ones() {
    let mut machine = Machine::new();
    machine.options.network = Some("shop".into());
    machine.options.runtime_dir = Some("/run/weft-2".into());
    machine.install().await;
    let plugin = &machine.conflist()["plugins"][0];
    assert_eq!(
        (&plugin["network"], &plugin["runtimeDir"]),
        (&json!("shop"), &json!("/run/weft-2"))
    );
    // The plugin refuses a directory that depends on where the runtime stands.
    machine.options.runtime_dir = Some("weft-3".into());
    machine.install().await;
    let written = machine.conflist()["plugins"][0]["runtimeDir"].clone();
    let absolute = std::env::current_dir().unwrap().join("weft-3");
    assert_eq!(written, json!(absolute));
    for wrong in ["", "a/b", "-a"] {
        machine.options.network = Some(wrong.into());
        let error = install(&machine.options, &READY).await.unwrap_err();
        assert!(matches!(error, SetupError::Name { .. }), "{error}");
    }
}

#[tokio::test]
async fn a_way_out_is_written_on_request() {
    let mut machine = Machine::new();
    machine.plugin("portmap", ALL);
    machine.plugin("bandwidth", ALL);
    machine.options.masquerade = true;
    let report = machine.install().await;
    assert!(report.notes.is_empty(), "{:?}", report.notes);
    let plugin = &machine.conflist()["plugins"][0];
    assert_eq!((&plugin["isDefaultGateway"], &plugin["ipMasq"]), (&json!(true), &json!(true)));
}

#[tokio::test]
async fn a_configuration_that_comes_first_is_named() {
    let machine = Machine::new();
    fs::create_dir_all(&machine.options.config_dir).unwrap();
    for name in ["05-other.conflist", "04-saved.conflist.bak", "99-loopback.conf"] {
        fs::write(machine.options.config_dir.join(name), "{}").unwrap();
    }
    let notes = machine.install().await.notes;
    assert!(notes.iter().any(|note| note.contains("05-other.conflist")), "{notes:?}");
}

#[tokio::test]
async fn removal_takes_away_both_files_and_can_be_repeated() {
    let machine = Machine::new();
    machine.plugin("portmap", ALL);
    let before = machine.files();
    machine.install().await;
    let options = &machine.options;
    let report = remove(options).unwrap();
    assert_eq!(report.changed, [options.conflist(), options.plugin()]);
    assert_eq!(machine.files(), before);
    assert!(remove(options).unwrap().changed.is_empty());
    fs::remove_dir_all(&options.config_dir).unwrap();
    fs::remove_dir_all(&options.bin_dir).unwrap();
    assert!(remove(options).unwrap().changed.is_empty());
}

#[tokio::test]
async fn an_unusable_place_is_named() {
    let mut machine = Machine::new();
    machine.options.bin_dir = machine.options.program.join("bin");
    let error = install(&machine.options, &READY).await.unwrap_err();
    assert!(error.to_string().contains("weft/bin"), "{error}");
    let mut machine = Machine::new();
    machine.options.program = machine.directory.path().join("none");
    let error = install(&machine.options, &READY).await.unwrap_err();
    assert!(error.to_string().contains("none"), "{error}");
    assert!(!machine.options.conflist().exists(), "no configuration without its plugin");
}

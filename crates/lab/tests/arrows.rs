//! The house that ARCHITECTURE.md draws: arrows between crates go down only, pure crates are pure, and
//! `unsafe` lives in `io` alone. Cargo's own metadata and the sources are the evidence.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Each crate with its kind and all that it may depend on inside the workspace.
const HOUSE: [(&str, &str, &[&str]); 15] = [
    ("weft-packet", "pure", &[]),
    ("weft-crypto", "pure", &["weft-packet"]),
    ("weft-path", "pure", &["weft-crypto", "weft-packet"]),
    ("weft-mesh", "pure", &["weft-crypto", "weft-packet"]),
    ("weft-openvpn", "pure", &["weft-crypto", "weft-packet"]),
    ("weft-io", "linux", &["weft-crypto", "weft-packet"]),
    (
        "weft-engine",
        "linux",
        &["weft-io", "weft-openvpn", "weft-path", "weft-crypto", "weft-packet"],
    ),
    (
        "weft-kernel",
        "linux",
        &["weft-io", "weft-openvpn", "weft-path", "weft-crypto", "weft-packet"],
    ),
    ("weft-link", "tokio", &["weft-mesh", "weft-path", "weft-crypto", "weft-packet"]),
    ("weft-api", "tokio", &[]),
    (
        "weft-container",
        "tokio",
        &["weft-api", "weft-mesh", "weft-path", "weft-crypto", "weft-packet"],
    ),
    (
        "weft-daemon",
        "tokio",
        &[
            "weft-api",
            "weft-container",
            "weft-link",
            "weft-kernel",
            "weft-engine",
            "weft-io",
            "weft-mesh",
            "weft-openvpn",
            "weft-path",
            "weft-crypto",
            "weft-packet",
        ],
    ),
    (
        "weft",
        "binary",
        &[
            "weft-daemon",
            "weft-container",
            "weft-api",
            "weft-link",
            "weft-kernel",
            "weft-engine",
            "weft-io",
            "weft-openvpn",
            "weft-crypto",
        ],
    ),
    ("weft-bench", "dev", &["*"]),
    ("weft-lab", "dev", &["*"]),
];

/// Outside crates that bring sockets, files, clocks, threads or an executor.
const IMPURE_CRATES: [&str; 12] = [
    "tokio",
    "quinn",
    "rustix",
    "libc",
    "nix",
    "mio",
    "socket2",
    "rtnetlink",
    "hyper",
    "axum",
    "getrandom",
    "tempfile",
];

/// Words of the standard library, and of `rand`, that a pure crate has no use for.
const IMPURE_WORDS: [&str; 12] = [
    "Instant::now(",
    "SystemTime::now(",
    "std::fs",
    "std::thread",
    "std::process",
    "std::env",
    "UdpSocket",
    "TcpStream",
    "TcpListener",
    "rand::random",
    "rand::rng(",
    "thread_rng",
];

/// A dependency: from, to, and Cargo's kind of it (`None` is a normal one).
#[derive(Debug, Clone, PartialEq, Eq)]
struct Arrow {
    from: String,
    to: String,
    kind: Option<String>,
}

#[test]
fn arrows_between_crates_go_down_only() {
    let wrong = wrong_arrows(&arrows(&metadata()));
    assert!(wrong.is_empty(), "arrows that ARCHITECTURE.md does not have: {wrong:#?}");
}

#[test]
fn the_house_has_the_crates_of_the_design() {
    let metadata = metadata();
    let mut names: Vec<&str> =
        packages(&metadata).iter().filter_map(|package| package["name"].as_str()).collect();
    let mut wanted: Vec<&str> = HOUSE.iter().map(|(name, ..)| *name).collect();
    names.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(names, wanted);
}

#[test]
fn an_arrow_upwards_is_found() {
    let arrow = |from: &str, to: &str, kind: Option<&str>| Arrow {
        from: from.to_owned(),
        to: to.to_owned(),
        kind: kind.map(str::to_owned),
    };
    for wrong in [
        arrow("weft-packet", "weft-crypto", None),
        arrow("weft-path", "weft-engine", None),
        arrow("weft-crypto", "tokio", None),
        arrow("weft", "weft-lab", None),
        arrow("weft", "weft-bench", None),
        arrow("weft-io", "weft-lab", Some("build")),
        arrow("weft-unknown", "weft-io", None),
    ] {
        assert_eq!(wrong_arrows(std::slice::from_ref(&wrong)), [wrong]);
    }
    for right in [
        arrow("weft-engine", "weft-io", None),
        arrow("weft-io", "tokio", None),
        arrow("weft-packet", "tempfile", Some("dev")),
        arrow("weft-lab", "weft", None),
    ] {
        assert!(wrong_arrows(std::slice::from_ref(&right)).is_empty(), "{right:?}");
    }
}

#[test]
fn each_crate_says_its_kind_first() {
    for (name, kind, _) in HOUSE {
        let text = std::fs::read_to_string(source_of(name).join("lib.rs")).unwrap();
        let first = text.lines().next().unwrap_or_default();
        assert!(first.starts_with(&format!("//! {kind}: ")), "{name} begins with `{first}`");
    }
}

#[test]
fn unsafe_lives_in_io_alone() {
    for (name, ..) in HOUSE.iter().filter(|(name, ..)| *name != "weft-io") {
        for root in ["lib.rs", "main.rs"] {
            let Ok(text) = std::fs::read_to_string(source_of(name).join(root)) else { continue };
            assert!(text.contains("#![forbid(unsafe_code)]"), "{name}/{root} does not forbid it");
        }
    }
}

#[test]
fn pure_crates_use_no_clock_socket_file_thread_or_random_source() {
    let mut found = Vec::new();
    for (name, ..) in HOUSE.iter().filter(|(_, kind, _)| *kind == "pure") {
        for file in sources(&source_of(name)) {
            let text = std::fs::read_to_string(&file).unwrap();
            for (number, word) in impure_words(&text) {
                found.push(format!("{}:{number}: {word}", file.display()));
            }
        }
    }
    assert!(found.is_empty(), "impure words in pure crates: {found:#?}");
}

#[test]
fn an_impure_word_is_found_outside_of_tests_and_comments_only() {
    let text = "// Instant::now( is not for us\nlet now = Instant::now();\n\
                #[cfg(test)]\nmod tests {\n    use std::thread;\n}\n";
    assert_eq!(impure_words(text), [(2, "Instant::now(")]);
}

fn wrong_arrows(arrows: &[Arrow]) -> Vec<Arrow> {
    arrows.iter().filter(|arrow| !is_right(arrow)).cloned().collect()
}

fn is_right(arrow: &Arrow) -> bool {
    let ours = |name: &str| name == "weft" || name.starts_with("weft-");
    if arrow.kind.as_deref() == Some("dev") {
        return true;
    }
    let Some((_, kind, allowed)) = HOUSE.iter().find(|(name, ..)| *name == arrow.from) else {
        return false;
    };
    if ours(&arrow.to) {
        return *kind == "dev" || allowed.contains(&arrow.to.as_str());
    }
    *kind != "pure" || !IMPURE_CRATES.contains(&arrow.to.as_str())
}

fn arrows(metadata: &Value) -> Vec<Arrow> {
    let mut arrows = Vec::new();
    for package in packages(metadata) {
        for dependency in package["dependencies"].as_array().unwrap() {
            arrows.push(Arrow {
                from: package["name"].as_str().unwrap().to_owned(),
                to: dependency["name"].as_str().unwrap().to_owned(),
                kind: dependency["kind"].as_str().map(str::to_owned),
            });
        }
    }
    assert!(!arrows.is_empty(), "cargo metadata names no dependency at all");
    arrows
}

fn packages(metadata: &Value) -> &Vec<Value> {
    metadata["packages"].as_array().unwrap()
}

fn metadata() -> Value {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .current_dir(workspace())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn source_of(name: &str) -> PathBuf {
    workspace().join("crates").join(name.strip_prefix("weft-").unwrap_or(name)).join("src")
}

/// The Rust files below a directory, without files of tests alone.
fn sources(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let stem = path.file_stem().unwrap().to_string_lossy().into_owned();
        if stem == "tests" || stem.ends_with("_tests") {
            continue;
        }
        if path.is_dir() {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

/// The impure words of a source up to its tests, comments left out, with their line numbers.
fn impure_words(text: &str) -> Vec<(usize, &'static str)> {
    let code = text.lines().enumerate().take_while(|(_, line)| line.trim() != "#[cfg(test)]");
    let mut found = Vec::new();
    for (index, line) in code {
        let code = line.split("//").next().unwrap_or_default();
        found.extend(
            IMPURE_WORDS.iter().filter(|word| code.contains(**word)).map(|word| (index + 1, *word)),
        );
    }
    found
}

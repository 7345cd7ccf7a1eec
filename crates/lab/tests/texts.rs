//! Texts of the tree name no text outside of it, and ARCHITECTURE.md is readable. Every path that a source or a
//! document names exists, and lines of pages fit.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::{Path, PathBuf};

/// How a text outside of the tree was named, in halves so that this file does not name one.
const OUTSIDE: [[&str; 2]; 4] =
    [["DES", "IGN"], ["refer", "ence `"], ["the refer", "ence's"], ["of the refer", "ence has"]];

/// Lines of ARCHITECTURE.md, which one is to read in fifteen minutes.
const MAP_LINES_MAX: usize = 300;
/// Characters of a line of it, and of a page of the design.
const LINE_CHARS_MAX: usize = 120;

/// The directories of texts, beside the root.
const DIRECTORIES: [&str; 5] = [".ci", "crates", "docs", "fuzz", "packaging"];
/// Directories in there that builds and the fuzzer fill.
const NOT_OURS: [&str; 3] = ["target", "corpus", "artifacts"];

#[test]
fn no_text_outside_of_the_tree_is_named() {
    let mut found = Vec::new();
    for file in all_texts() {
        found.extend(outside(&read(&file)).into_iter().map(|line| place(&file, line)));
    }
    assert!(found.is_empty(), "texts that readers do not have are named in {found:#?}");
}

#[test]
fn each_document_that_is_named_is_there() {
    let mut found = Vec::new();
    for file in all_texts() {
        for (line, path) in documents(&read(&file)) {
            if !root().join(&path).is_file() {
                found.push(format!("{}: {path}", place(&file, line)));
            }
        }
    }
    assert!(found.is_empty(), "documents are named that are not there: {found:#?}");
}

#[test]
fn each_link_of_a_document_leads_somewhere() {
    let mut found = Vec::new();
    for file in all_texts().into_iter().filter(|file| is(file, "md")) {
        for (line, target) in links(&read(&file)) {
            if !file.parent().unwrap().join(&target).exists() {
                found.push(format!("{}: {target}", place(&file, line)));
            }
        }
    }
    assert!(found.is_empty(), "links that lead nowhere: {found:#?}");
}

#[test]
fn the_map_and_its_pages_can_be_read() {
    let map = root().join("ARCHITECTURE.md");
    let lines = read(&map).lines().count();
    assert!(lines <= MAP_LINES_MAX, "ARCHITECTURE.md has {lines} lines, {MAP_LINES_MAX} at most");
    let mut pages = texts(&root().join("docs/design"));
    assert!(!pages.is_empty());
    pages.push(map);
    let mut found = Vec::new();
    for page in pages {
        found.extend(long_lines(&read(&page)).into_iter().map(|line| place(&page, line)));
    }
    assert!(found.is_empty(), "lines of more than {LINE_CHARS_MAX} characters: {found:#?}");
}

#[test]
fn each_page_of_the_design_is_on_the_map() {
    let map = read(&root().join("ARCHITECTURE.md"));
    for page in texts(&root().join("docs/design")) {
        let name = format!("docs/design/{}", page.file_name().unwrap().to_string_lossy());
        assert!(map.contains(&name), "ARCHITECTURE.md does not name {name}");
    }
}

#[test]
fn each_fault_is_found() {
    let [first, last] = OUTSIDE[0];
    let text = format!("one\nas {first}{last} section 4 says\n");
    assert_eq!(outside(&text), [2]);
    assert!(outside("as the design says, by reference to the page\n").is_empty());
    // Written in halves again: these documents are not there.
    let text = "see `@a-b/c.md`, @x.md.\n//! (`@y_1.md`, MTU) @design/*.md ../@z.md @ d.md";
    let named: Vec<(usize, String)> = documents(&text.replace('@', "docs/"));
    let expected = [(1, "@a-b/c.md"), (1, "@x.md"), (2, "@y_1.md")];
    assert_eq!(named, expected.map(|(line, path)| (line, path.replace('@', "docs/"))));
    let text = "[a](b.md) and ![c](d.svg#e), [f](https://g.example/h.md)\n[i](#j)\n[k] (l)";
    assert_eq!(links(text), [(1, "b.md".to_owned()), (1, "d.svg".to_owned())]);
    let long = "é".repeat(LINE_CHARS_MAX);
    assert_eq!(long_lines(&format!("{long}\n{long}x\n")), [2]);
}

/// The lines that name a text outside of the tree.
fn outside(text: &str) -> Vec<usize> {
    let names = OUTSIDE.map(|halves| halves.concat());
    numbered(text)
        .filter(|(_, line)| names.iter().any(|name| line.contains(name)))
        .map(|(number, _)| number)
        .collect()
}

/// The documents that a text names by their path from the root, with their lines.
fn documents(text: &str) -> Vec<(usize, String)> {
    let is_of_path = |c: char| c.is_ascii_alphanumeric() || "/-_.".contains(c);
    let mut found = Vec::new();
    for (number, line) in numbered(text) {
        for (start, _) in line.match_indices("docs/") {
            // A preceding path character means another path, as in a link of a document to its neighbour.
            if line[..start].ends_with(is_of_path) {
                continue;
            }
            let rest = &line[start..];
            let path = &rest[..rest.find(|c| !is_of_path(c)).unwrap_or(rest.len())];
            let path = path.trim_end_matches('.');
            if path.ends_with(".md") {
                found.push((number, path.to_owned()));
            }
        }
    }
    found
}

/// The targets in the tree of a document's links, with their lines.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (number, line) in numbered(text) {
        for (_, rest) in line.match_indices("](").map(|(at, _)| line.split_at(at + 2)) {
            let Some((target, _)) = rest.split_once(')') else { continue };
            let target = target.split('#').next().unwrap_or_default();
            if !target.is_empty() && !target.contains("://") {
                found.push((number, target.to_owned()));
            }
        }
    }
    found
}

fn long_lines(text: &str) -> Vec<usize> {
    numbered(text)
        .filter(|(_, line)| line.chars().count() > LINE_CHARS_MAX)
        .map(|(number, _)| number)
        .collect()
}

fn numbered(text: &str) -> impl Iterator<Item = (usize, &str)> {
    (1..).zip(text.lines())
}

/// The sources and documents of the tree.
fn all_texts() -> Vec<PathBuf> {
    let at_root = std::fs::read_dir(root()).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> = at_root.filter(|path| is_text(path)).collect();
    files.extend(DIRECTORIES.iter().flat_map(|directory| texts(&root().join(directory))));
    files
}

/// Those below a directory.
fn texts(directory: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && !NOT_OURS.contains(&name.as_str()) {
            files.extend(texts(&path));
        } else if is_text(&path) {
            files.push(path);
        }
    }
    files
}

fn is_text(path: &Path) -> bool {
    let known = ["rs", "md", "toml", "yml", "sh"].iter().any(|end| is(path, end));
    path.is_file() && (known || path.ends_with("dev") || path.ends_with(".ci/run"))
}

fn is(file: &Path, extension: &str) -> bool {
    file.extension().is_some_and(|found| found == extension)
}

fn read(file: &Path) -> String {
    std::fs::read_to_string(file).unwrap()
}

fn place(file: &Path, line: usize) -> String {
    format!("{}:{line}", file.strip_prefix(root()).unwrap_or(file).display())
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

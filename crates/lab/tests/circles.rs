//! Files of a crate import each other in no circle, except a module and the modules inside it. The `use`
//! declarations of the sources and the paths in their code are the evidence.
#![allow(clippy::unwrap_used, missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// A module's path in its crate; empty for the root.
type Module = Vec<String>;

/// The imports of each module.
type Imports = BTreeMap<Module, BTreeSet<Module>>;

#[test]
fn files_import_each_other_in_no_circle() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for folder in std::fs::read_dir(crates).unwrap() {
        let name = folder.unwrap();
        let (source, name) = (name.path().join("src"), name.file_name().display().to_string());
        let modules: Vec<(Module, String)> = sources(&source)
            .into_iter()
            .map(|file| {
                let text = std::fs::read_to_string(&file).unwrap();
                (module_of(file.strip_prefix(&source).unwrap()), text)
            })
            .collect();
        let imports = imports(&modules);
        assert!(imports.values().any(|imported| !imported.is_empty()), "{name} imports nothing");
        let circle = circle(&imports);
        assert!(circle.is_empty(), "modules of {name} that import each other: {circle:?}");
    }
}

#[test]
fn a_circle_is_found_however_it_is_written() {
    let found = |files: &[(&str, &str)]| {
        let modules: Vec<(Module, String)> =
            files.iter().map(|(name, text)| (path(name), (*text).to_owned())).collect();
        circle(&imports(&modules)).iter().map(|module| module.join("::")).collect::<Vec<_>>()
    };
    let c = "use std::io;\nuse super::a::{\n    One,\n    two::{Three, Four},\n};\n";
    let files = [
        ("a", "pub(crate) use crate::b::Two;\n"),
        ("b", "// What is of use may\nuse crate::{One, inner::{self, c::Three}};\n"),
        ("inner", "mod c;\n"),
        ("inner::c", &c.replace("super::a", "super::super::a")),
    ];
    assert_eq!(found(&files), ["a", "b", "inner::c"]);
    let files = [
        ("a", "fn f() -> u8 {\n    crate::b::g(super::super::c::H)\n}\n"),
        ("b", "// See crate::c.\nfn g(of: super::a::T) {}\n"),
        ("c", "pub(super) struct H;\n"),
    ];
    assert_eq!(found(&files), ["a", "b"]);
    // A module and those inside it may, as may tests.
    let files = [
        ("", "mod a;\nuse a::One;\n"),
        ("a", "mod b;\nuse self::b::Two;\nuse crate::One;\n"),
        ("a::b", "use super::One;\n#[cfg(test)]\nmod tests {\n    use crate::c::Three;\n}\n"),
        ("c", "use crate::a::b::Two;\n"),
    ];
    assert_eq!(found(&files), [""; 0]);
}

/// The modules of a circle, if there is one.
fn circle(imports: &Imports) -> Vec<Module> {
    let reached = |from: &Module| {
        let (mut reached, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(module) = next.pop() {
            for imported in imports.get(module).into_iter().flatten() {
                if reached.insert(imported) {
                    next.push(imported);
                }
            }
        }
        reached
    };
    let first = imports.keys().find(|module| reached(module).contains(module));
    let Some(first) = first else { return Vec::new() };
    reached(first).into_iter().filter(|module| reached(module).contains(first)).cloned().collect()
}

/// The imports of each module, without the modules around it and inside it.
fn imports(modules: &[(Module, String)]) -> Imports {
    let names: BTreeSet<&Module> = modules.iter().map(|(module, _)| module).collect();
    let of = |(module, text): &(Module, String)| {
        let text = without_tests(text);
        let paths = declarations(text).into_iter().chain(paths_in_code(text));
        let paths = paths.filter_map(|path| absolute(module, &path));
        let imported = paths.filter_map(|path| {
            (0..=path.len()).rev().map(|len| path[..len].to_vec()).find(|name| names.contains(name))
        });
        let imported =
            imported.filter(|other| !other.starts_with(module) && !module.starts_with(other));
        (module.clone(), imported.collect())
    };
    modules.iter().map(of).collect()
}

/// A source up to its tests.
fn without_tests(text: &str) -> &str {
    &text[..text.find("#[cfg(test)]\nmod tests").unwrap_or(text.len())]
}

/// The paths in a source's code that begin at the crate or at the module around.
fn paths_in_code(text: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for code in text.lines().map(|line| line.split("//").next().unwrap_or_default()) {
        for (at, _) in code.match_indices("crate::").chain(code.match_indices("super::")) {
            let is_part = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
            let is_inside = code[..at].ends_with(is_part);
            if !is_inside {
                let path = code[at..].split(|letter| !is_part(letter)).next().unwrap_or_default();
                paths.push(path.trim_end_matches(':').to_owned());
            }
        }
    }
    paths
}

/// The paths of a source's `use` declarations.
fn declarations(text: &str) -> Vec<String> {
    let mut paths = Vec::new();
    for (at, _) in text.match_indices("use ") {
        let line = text[..at].rsplit('\n').next().unwrap_or_default();
        if ["", "pub ", "pub(crate) ", "pub(super) "].contains(&line) {
            let declaration = text[at + "use ".len()..].split(';').next().unwrap_or_default();
            expand("", declaration, &mut paths);
        }
    }
    paths
}

/// Each path of a tree of them.
fn expand(prefix: &str, tree: &str, paths: &mut Vec<String>) {
    let tree = tree.trim();
    let Some((before, inside)) = tree.split_once('{') else {
        paths.push(format!("{prefix}{tree}"));
        return;
    };
    let prefix = format!("{prefix}{before}");
    let inside = inside.trim_end().strip_suffix('}').unwrap_or(inside);
    let (mut depth, mut start) = (0, 0);
    for (at, letter) in inside.char_indices().chain([(inside.len(), ',')]) {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                if !inside[start..at].trim().is_empty() {
                    expand(&prefix, &inside[start..at], paths);
                }
                start = at + 1;
            }
            _ => {}
        }
    }
}

/// The file in the crate that a path leads to; `None`: another crate.
fn absolute(module: &Module, path: &str) -> Option<Module> {
    let mut words =
        path.split("::").map(|word| word.split(" as ").next().unwrap_or_default().trim());
    let mut place = match words.next()? {
        "crate" => Module::new(),
        "self" => module.clone(),
        "super" => module.split_last()?.1.to_vec(),
        _ => return None,
    };
    for word in words {
        match word {
            "super" => drop(place.pop()),
            "self" => {}
            word => place.push(word.to_owned()),
        }
    }
    Some(place)
}

fn path(name: &str) -> Module {
    name.split("::").filter(|word| !word.is_empty()).map(str::to_owned).collect()
}

fn module_of(file: &Path) -> Module {
    let mut words: Module =
        file.with_extension("").iter().map(|word| word.to_string_lossy().into_owned()).collect();
    if words.last().is_some_and(|word| ["mod", "lib", "main"].contains(&word.as_str())) {
        words.pop();
    }
    words
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
